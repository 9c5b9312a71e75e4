"""Copies of runs without names of people and machines, and without secrets: records are public.

Home folders, user names in paths, hosts and secrets, also in URLs, are replaced by markers such as
<redacted:home>, in run.json and log.txt alike, so a copy is as consistent as its run. The source at
the head of log.txt is not changed, because its hash is checked.
"""

import contextlib
import getpass
import json
import re
import shutil
from pathlib import Path

RULE = re.compile(r"^={100}\n", re.M)  # after the source in log.txt
END = r"(?=[/\s:;,'\"]|$)"  # of a part of a path
HOME = rf"/(?:home|Users)/([^/\s:;,'\"]+)|/root{END}"
# Variables of the environment, by their names.
SECRET = re.compile("TOKEN|KEY|SECRET|PASS|AUTH|CRED", re.I)
HOST = re.compile("HOSTNAME|ADDRESS", re.I)
MARKER = "<redacted:"
LOGIN = re.compile(r"(?<=://)[^/\s@'\"]+(?=@)")  # USER:PASSWORD in a URL
PLACE = re.compile(r"[a-z]+://[^\s'\",]+|(?<![\w.:/>-])/[\w.-][^\s'\",:;]*")  # URL or absolute path
COORDINATOR = re.compile(r"(--coordinator[= ]+)\S+")


class Redactor:
    """Redacts the fields of run.json and the lines of log.txt of one run.

    facts: run.json. log: log.txt without the source; a resumed run has other commands there.
    """

    def __init__(self, facts: dict, log: str):
        self.kinds = set()  # of what has been replaced
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
        """What replaces something of this kind."""
        self.kinds.add(kind)
        return f"<redacted:{kind}>"

    def text(self, text: str) -> str:
        """A text without home folders, user names, and logins in URLs."""
        text = LOGIN.sub(lambda _: self.marker("secret"), text)
        text = self.homes.sub(lambda _: self.marker("home"), text)
        return self.users.sub(lambda _: self.marker("user"), text) if self.users else text

    def variable(self, name: str, value: str) -> str:
        """The value of a variable of the environment."""
        if SECRET.search(name):
            return self.marker("secret")
        return self.marker("host") if HOST.search(name) else self.text(value)

    def field(self, name: str, value):
        """The value of a field of run.json, or of a part of one."""
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
        """A line of log.txt behind the source: many are NAME: FIELD. If there is nothing to redact
        in the field, the line is as it was."""
        name, colon, value = line.partition(": ")
        if name == "command":
            return f"{name}{colon}{self.field(name, value)}"
        try:
            value = json.loads(value)
        except ValueError:
            return self.text(line)
        redacted = self.field(name, value)
        return line if redacted == value else f"{name}{colon}{json.dumps(redacted)}"


def read_texts(run_dir: Path) -> tuple[dict, str, str]:
    """(run.json, the source in log.txt, the rest of log.txt)."""
    facts = json.loads((run_dir / "run.json").read_text("utf-8"))
    log = (run_dir / "log.txt").read_bytes().decode()
    end = RULE.search(log).start()
    return facts, log[:end], log[end:]


def copy_redacted(run_dir: Path, copy: Path) -> tuple[set[str], set[str]]:
    """Copy the files of a run that a record has; returns the kinds of what was replaced, and the
    absolute paths and URLs that the copy still has, for its owner to look at."""
    facts, source, log = read_texts(run_dir)
    redactor = Redactor(facts, log)
    new = {name: redactor.field(name, value) for name, value in facts.items()}
    copy.mkdir()
    shutil.copy(run_dir / "metrics.jsonl", copy)
    if new == facts:
        shutil.copy(run_dir / "run.json", copy)
    else:
        (copy / "run.json").write_text(json.dumps(new, indent=1) + "\n", "utf-8")
    log = "\n".join(map(redactor.line, log.split("\n")))
    (copy / "log.txt").write_bytes((source + log).encode())
    return redactor.kinds, {*PLACE.findall(log)}
