"""Copy runs without private data, because records are public.

Markers such as <redacted:home> replace home folders, user names in paths, hosts and secrets, also
in URLs. run.json and log.txt change in the same way, so the copy is still consistent. In log.txt,
one line with the source's hash replaces the source. `add` stores the source once per record; it is
not redacted, because its hash is checked.
"""

import contextlib
import getpass
import json
import re
import shutil
from pathlib import Path

from checks import RULE, Run, require, source_line

END = r"(?=[/\s:;,'\"]|$)"  # end of a part of a path
HOME = rf"/(?:home|Users)/([^/\s:;,'\"]+)|/root{END}"
SECRET = re.compile("TOKEN|KEY|SECRET|PASS|AUTH|CRED", re.I)  # in names of variables
HOST = re.compile("HOSTNAME|ADDRESS", re.I)  # in names of variables
MARKER = "<redacted:"
LOGIN = re.compile(r"(?<=://)[^/\s@'\"]+(?=@)")  # USER:PASSWORD in a URL
PLACE = re.compile(r"[a-z]+://[^\s'\",]+|(?<![\w.:/>-])/[\w.-][^\s'\",:;]*")  # URL or absolute path
COORDINATOR = re.compile(r"(--coordinator[= ]+)\S+")


class Redactor:
    """Redacts the fields of run.json and the lines of log.txt (without the source) of one run."""

    def __init__(self, facts: dict, log: str):
        self.kinds = set()  # kinds of the replaced text
        own = str(Path.home())
        homes = HOME if own == "/" else f"{HOME}|{re.escape(own)}{END}"
        self.homes = re.compile(homes)
        text = json.dumps(facts, ensure_ascii=False) + log
        users = {match[1] for match in self.homes.finditer(text) if match[1]}
        with contextlib.suppress(OSError, KeyError):  # this user may have no name
            users.add(getpass.getuser())
        names = "|".join(map(re.escape, users - {"root"}))
        self.users = re.compile(f"(?<=/)({names}){END}") if names else None

    def marker(self, kind: str) -> str:
        """Return the marker of this kind of text."""
        self.kinds.add(kind)
        return f"{MARKER}{kind}>"

    def text(self, text: str) -> str:
        """Redact home folders, user names, and logins in URLs."""
        text = LOGIN.sub(lambda _: self.marker("secret"), text)
        text = self.homes.sub(lambda _: self.marker("home"), text)
        return self.users.sub(lambda _: self.marker("user"), text) if self.users else text

    def variable(self, name: str, value: str) -> str:
        """Redact the value of an environment variable."""
        if SECRET.search(name):
            return self.marker("secret")
        return self.marker("host") if HOST.search(name) else self.text(value)

    def field(self, name: str, value):
        """Redact a field of run.json, or a part of a field."""
        if name == "command":
            hidden = COORDINATOR.sub(lambda match: match[1] + self.marker("host"), value)
            return self.text(hidden)
        if name == "environment":
            return {key: self.variable(key, text) for key, text in value.items()}
        if isinstance(value, dict):
            return {key: self.field("", x) for key, x in value.items()}
        if isinstance(value, list):
            return [self.field("", x) for x in value]
        return self.text(value) if isinstance(value, str) else value

    def line(self, line: str) -> str:
        """Redact a line of log.txt, such as NAME: FIELD of run.json."""
        name, colon, value = line.partition(": ")
        if name == "command":
            return f"{name}{colon}{self.field(name, value)}"
        try:
            value = json.loads(value)
        except ValueError:
            return self.text(line)
        redacted = self.field(name, value)
        return line if redacted == value else f"{name}{colon}{json.dumps(redacted)}"


def copy_redacted(run: Run, copy: Path) -> tuple[set[str], set[str]]:
    """Copy a run without its source.

    Return (kinds of the replaced text, absolute paths and URLs in the copy).
    """
    run_dir, facts = run.folder, run.facts
    log = (run_dir / "log.txt").read_bytes().decode()
    log = log[RULE.search(log).start() :]
    marked = f"{run_dir.name} has a {MARKER}...> in it: name the original runs, not copies"
    require(MARKER not in f"{json.dumps(facts)}{log}", marked)
    redactor = Redactor(facts, log)
    new = {name: redactor.field(name, value) for name, value in facts.items()}
    copy.mkdir()
    shutil.copy(run_dir / "metrics.jsonl", copy)
    if new == facts:
        shutil.copy(run_dir / "run.json", copy)
    else:
        (copy / "run.json").write_text(json.dumps(new, indent=1) + "\n", "utf-8")
    log = "\n".join(map(redactor.line, log.split("\n")))
    (copy / "log.txt").write_bytes((source_line(run.source) + log).encode())
    return redactor.kinds, {*PLACE.findall(log)}
