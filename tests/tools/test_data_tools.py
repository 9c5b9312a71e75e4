"""The other tools in data/: shards and encodings, the demo corpus, the download."""

import errno
import fcntl
import os
import re
import shutil
import signal
import subprocess
import sys
import types
from collections import Counter
from concurrent.futures import ThreadPoolExecutor, wait
from hashlib import sha256
from itertools import pairwise
from pathlib import Path

import builtin_corpus  # conftest.py has put data/ on the path
import cached_fineweb10B
import numpy as np
import pytest
import shards
from conftest import ROOT

import train_gpt as T


def test_the_trainer_reads_a_written_shard(tmp_path):
    path, tokens = tmp_path / "x_train_000007.bin", [50256, 0, 65535, 3]
    shards.write_shard(path, np.array(tokens, np.uint16))
    assert T.open_shard(path).tolist() == tokens
    header = np.fromfile(path, "<i4", 256)
    assert header[:3].tolist() == [20240520, 1, 4] and not header[3:].any()
    assert path.stat().st_size == 1024 + 2 * 4


@pytest.mark.parametrize("crash", [OSError(errno.ENOSPC, "No space left"), KeyboardInterrupt()])
def test_a_crash_while_writing_leaves_the_old_file(tmp_path, monkeypatch, crash):
    def crashes(*_):
        raise crash

    old, new = tmp_path / "x_train_000001.bin", tmp_path / "x_train_000002.bin"
    shards.write_shard(old, np.ones(5, np.uint16))
    monkeypatch.setattr(os, "replace", crashes)
    for path in (old, new):
        with pytest.raises(type(crash)):
            shards.write_shard(path, np.zeros(9, np.uint16))
    assert [*tmp_path.iterdir()] == [old]
    assert T.open_shard(old).tolist() == [1] * 5


@pytest.mark.parametrize("tool", ["tokenize_text", "builtin_corpus", "cached_fineweb10B"])
def test_on_windows_one_line_advises_wsl(tool):
    """With -P, Python does not add the script's folder to the path."""
    code = f"import runpy, sys; sys.modules['fcntl'] = None; runpy.run_path('data/{tool}.py')"
    argv = [sys.executable, "-P", "-c", code]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    assert done.stderr.startswith("error: import of fcntl halted") and "use WSL" in done.stderr


# ---- train_gpt.py runs the tools; its cache ------------------------------------------------------


def test_tools_run_in_an_unusual_python(tmp_path, monkeypatch):
    """It has no lzma, prints when it starts, and does not add the script's folder to the path."""
    code = "import sys; sys.modules |= {'lzma': None, '_lzma': None}; print('[welcome]')"
    (tmp_path / "sitecustomize.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("PYTHONSAFEPATH", "1")
    text = tmp_path / "a.txt"
    text.write_text("Roses are red. " * 900)
    items, validation = T.settings_for([str(text)], [], "tiny", ["steps=5"])
    assert validation.startswith("the last tenth")
    assert items[0].startswith(f"data={text}.tokens/")


@pytest.fixture
def tool(tmp_path, monkeypatch):
    """Return a function that writes the source of data/tool.py, a tool of train_gpt.py."""

    def write(source):
        (tmp_path / "data").mkdir(exist_ok=True)
        (tmp_path / "data/tool.py").write_text(f"import os, signal, sys, time\n{source}")
        monkeypatch.setattr(T, "__file__", str(tmp_path / "train_gpt.py"))

    return write


def test_a_tool_that_is_killed_is_reported(tool):
    for number, reason in (
        (9, r"9\), probably for lack of memory: use less text, or"),
        (15, r"15\)$"),
    ):
        tool(f"os.kill(os.getpid(), {number})")
        with pytest.raises(T.UserError, match=rf"^data/tool.py was killed \(signal {reason}"):
            T.run_tool("tool.py")
    tool("sys.exit(2)")
    with pytest.raises(T.UserError, match="^$"):  # the tool has printed the reason
        T.run_tool("tool.py")


KILLS_TRAINERS = """
import os, signal, sys, time
from pathlib import Path
import train_gpt as T

T.__file__ = sys.argv[1]
started = Path("pid")
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    trainer = os.fork()
    if not trainer:
        sys.exit(T.report_errors(lambda: T.run_tool("tool.py")))
    while not started.exists():
        time.sleep(0.01)
    tool = int(started.read_text())
    started.unlink()
    os.kill(trainer, number)
    _, status = os.waitpid(trainer, 0)
    assert os.waitstatus_to_exitcode(status) == 128 + number
    try:
        os.kill(tool, 0)
    except ProcessLookupError:
        print("both ended")
"""


def test_signals_that_end_the_trainer_end_its_tool(tmp_path, tool):
    tool("open('new', 'w').write(str(os.getpid())); os.rename('new', 'pid'); time.sleep(60)")
    argv = [sys.executable, "-W", "ignore", "-c", KILLS_TRAINERS, T.__file__]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(argv, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=50)
    assert (done.returncode, done.stdout, done.stderr) == (0, "both ended\n" * 3, "")


def test_signal_handlers_are_restored_after_a_tool_has_run(tool):
    def of_user(number, frame):
        pass

    tool("print('done')")
    before = {number: signal.getsignal(number) for number in T.STOPS}
    try:
        signal.signal(signal.SIGTERM, of_user)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        assert T.run_tool("tool.py") == "done\n"
        assert signal.getsignal(signal.SIGTERM) is of_user
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(T.run_tool, "tool.py").result() == "done\n"
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_the_demo_corpus_of_a_read_only_checkout_is_in_the_cache(tmp_path, tool, monkeypatch):
    files = "x_train_000001.bin", "x_val_000000.bin", "merges.json"
    tool(f"import pathlib; folder = pathlib.Path(sys.argv[1]); folder.mkdir(parents=True)\n"
         f"for name in {files}: (folder / name).touch()")  # fmt: skip
    (tmp_path / "data/tool.py").rename(tmp_path / "data/builtin_corpus.py")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    access = os.access

    def refused(path, mode):
        return "data" not in str(path) and access(path, mode)

    monkeypatch.setattr(os, "access", refused)
    cfg, said, cache = T.PRESETS["tiny"], [], tmp_path / "cache/train_gpt/builtin"
    for _ in range(2):
        assert T.data_folder(cfg, said.append) == T.data_place(cfg.data) == cache
    assert said == [f"making the demo corpus in {cache}"]
    shutil.copytree(cache, tmp_path / "data/builtin")  # made before it was read-only
    assert T.data_folder(cfg, said.append) == tmp_path / "data/builtin"
    shutil.rmtree(tmp_path / "data/builtin")
    monkeypatch.setattr(T, "user_cache", lambda: None)
    with pytest.raises(
        T.UserError, match="data/builtin is not writable for the demo corpus: pass a text"
    ):
        T.data_folder(cfg, said.append)


def test_a_user_without_home_has_no_cache(tmp_path, monkeypatch):
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(T.os.path, "expanduser", lambda text: text)  # no entry in passwd either
    assert T.user_cache() is None
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert T.user_cache() == tmp_path / "train_gpt"


def test_decoding_returns_the_text(tmp_path):
    (tmp_path / "merges.json").write_text('["7468", "746865"]')  # th, the
    encoding = shards.text_encoding("bpe", tmp_path)
    ids = encoding.encode_ordinary("the other Grüße")
    assert ids[0] == 257 and encoding.eot_token == 258 == encoding.n_vocab - 1
    assert encoding.decode(ids) == "the other Grüße"


def test_a_missing_encoding_is_named_in_one_line(tmp_path, monkeypatch):
    for content in (None, "[", '{"a": 1}', "[1]", '["xy"]'):
        if content:
            (tmp_path / "merges.json").write_text(content)
        with pytest.raises(T.UserError, match=r"merges.json cannot be used \(.*make the data aga"):
            shards.text_encoding("bpe", tmp_path)

    def offline(_):
        raise ConnectionError("no route to host")

    monkeypatch.setattr("tiktoken.get_encoding", offline)
    with pytest.raises(T.UserError, match="or set TIKTOKEN_CACHE_DIR"):
        shards.text_encoding("gpt2")


@pytest.mark.slow
def test_the_corpus_is_reproducible_and_its_validation_is_not_in_training(tmp_path):
    """A process with another hash seed makes it; this process learns the merges again."""
    argv = [sys.executable, builtin_corpus.__file__, tmp_path]
    env = os.environ | {"PYTHONHASHSEED": "1"}
    done = subprocess.run(argv, env=env, capture_output=True, text=True)
    assert done.returncode == 0 and "tokens for training" in done.stdout, done.stderr
    names = ["builtin_train_000001.bin", "builtin_val_000000.bin", "merges.json"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names

    cfg, encoding = T.PRESETS["tiny"], shards.text_encoding("bpe", tmp_path)
    train, val = (T.open_shard(tmp_path / name) for name in names[:2])
    assert len(train) >= cfg.tokens_after(cfg.steps) and len(val) > cfg.val_tokens
    texts, parts = [], []
    for tokens in (train, val):
        assert tokens[0] == encoding.eot_token == cfg.bos
        pieces = np.split(tokens, np.flatnonzero(tokens == cfg.bos))[1:]
        texts.append([encoding.decode(piece[1:]) for piece in pieces])
        paragraphs = (part for text in texts[-1] for part in text.split("\n\n"))
        parts.append({part.strip() for part in paragraphs if len(part) > 300})
    assert len(parts[1]) > 50 and not parts[0] & parts[1]
    assert sum(len(text.encode()) for text in texts[1]) >= 300_000

    merges = builtin_corpus.learn_merges(texts[0], cfg.bos - 256)
    assert merges == [encoding.decode_single_token_bytes(256 + i) for i in range(len(merges))]
    arrays = shards.encode_documents(encoding, texts[1])
    np.testing.assert_array_equal(np.concatenate(arrays), val)


def slow_merges(texts: list[str], count: int) -> list[bytes]:
    """Learn byte-pair encoding; count all pairs again for every merge."""
    found = [word for text in texts for word in re.findall(shards.BYTE_BPE_PATTERN, text)]
    words = [[bytes([byte]) for byte in word.encode()] for word in found]
    merges = []
    while len(merges) < count:
        counts = Counter(pair for word in words for pair in pairwise(word))
        first, second = min(counts, key=lambda pair: (-counts[pair], pair))
        if first + second not in merges:
            merges.append(first + second)
        for word in words:
            for at in range(len(word) - 1):
                if word[at : at + 2] == [first, second]:
                    word[at : at + 2] = [first + second]
    return merges


def test_merges_equal_the_merges_of_plain_counting():
    texts = ["aaaa aaab banana bandana", "  indented\n\n    more  \n", "naïve 1234 12 123!"] * 3
    for seed in range(20):  # few letters give many ties
        texts.append("".join(np.random.default_rng(seed).choice(list("aab b"), 400)))
        assert builtin_corpus.learn_merges(texts[-5:], 40) == slow_merges(texts[-5:], 40)


SOURCE = '''"""About the module."""
# A comment of eight words or more is kept, as this one.
TEXT = """
# This is not a comment, however many words it has, but a string.
"""
class A(Base):
    async def f(self, x: int = 1):  # short
        """About the method."""
'''


def test_the_corpus_has_the_docstrings_and_comments_of_a_module(tmp_path):
    for folder in (tmp_path / "package", tmp_path / "package" / "tests"):
        folder.mkdir()
        (folder / "__init__.py").write_text(SOURCE)
    assert builtin_corpus.module_documents(tmp_path) == [[
        ("package\n", "About the module."),
        ("", "A comment of eight words or more is kept, as this one."),
        ("package.A.f(self, x: int=1)\n", "About the method."),
    ]]  # fmt: skip


def test_the_corpus_drops_repeats_and_splits_long_modules():
    long, short = "a long paragraph " * 20, "a short one"
    first = [("h\n", long), ("h\n", short)]
    second = [("h\n", short), ("i\n", f"{short}\n\nnew {long}\n\n{long}")]
    kept = [f"h\n{long}\n\nh\n{short}\n", f"i\n{short}\n\nnew {long}\n"]
    assert [*builtin_corpus.without_repeats([first, second, first, [("", "short")]])] == kept
    several = ["abcdefg"[i] * 1500 for i in range(7)]
    pieces = [*builtin_corpus.without_repeats([[("", text) for text in several]])]
    assert pieces == ["\n".join(f"{x}\n" for x in several[i : i + 3]) for i in (0, 3, 6)]


def test_a_python_without_sources_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr("sysconfig.get_path", lambda _: str(tmp_path / "python.zip"))
    with pytest.raises(T.UserError, match="no Python sources in .*python.zip"):
        builtin_corpus.main([str(tmp_path / "out")])
    with pytest.raises(OSError, match="Not a directory"):
        builtin_corpus.main([f"{__file__}/x"])


@pytest.fixture
def hub(tmp_path_factory, monkeypatch):
    """Replace huggingface_hub: shards have 50 tokens, `hub.asked` lists the downloads."""
    place = "kjj0/fineweb10B-gpt2", "dataset", "889765ea1f903759787add96995d81171b632d0c"

    def get_paths_info(repo, paths, *, repo_type, revision):
        assert (repo, repo_type, revision) == place
        if hub.offline:
            raise ConnectionError("offline")
        lfs = types.SimpleNamespace(sha256=hub.sha256)
        return [types.SimpleNamespace(path=path, lfs=lfs) for path in paths]

    def hf_hub_download(repo, name, *, repo_type, revision, local_dir):
        assert (repo, repo_type, revision) == place
        hub.asked.append(name)
        with open(Path(local_dir).parent / ".lock") as lock, pytest.raises(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # no other download can run
        if hub.error:
            raise hub.error
        path = Path(local_dir) / name
        if not path.exists():  # the real function does not check an existing file
            shutil.copy(shard, path)
        os.truncate(path, path.stat().st_size - hub.lost_bytes)

    shard = tmp_path_factory.mktemp("hub") / "shard"
    shards.write_shard(shard, np.arange(50, dtype=np.uint16))
    hub = types.SimpleNamespace(hf_hub_download=hf_hub_download, asked=[], error=None, lost_bytes=0)
    hub.HfApi = lambda: types.SimpleNamespace(get_paths_info=get_paths_info)
    hub.sha256, hub.offline = sha256(shard.read_bytes()).hexdigest(), False
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    return hub


def test_the_download_gets_what_is_missing_or_damaged(tmp_path, hub, capsys, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    folder = tmp_path / "new" / "fineweb10B"
    names = ["fineweb_val_000000.bin", *(f"fineweb_train_{n:06d}.bin" for n in range(1, 10))]

    def asked(*argv):
        hub.asked.clear()
        cached_fineweb10B.main([*argv, "--dir=~/new/fineweb10B"])
        assert all(len(T.open_shard(path)) == 50 for path in folder.glob("*.bin"))
        return hub.asked

    assert asked("2") == names[:3]
    assert asked("3") == names[3:4]
    os.truncate(folder / names[2], 1100)
    assert asked("3") == names[2:3]
    assert asked() == names[4:]  # nine is the default
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert asked("9") == []  # without the library and the network
    assert "the validation shard and 9 training shards, all complete" in capsys.readouterr().out


def test_a_failed_download_has_its_reason_in_one_line(tmp_path, hub, monkeypatch):
    def fails(reason, count="1"):
        hub.asked.clear()
        with pytest.raises(T.UserError, match=reason):
            cached_fineweb10B.main([count, "--dir", str(tmp_path)])
        return len(hub.asked)

    for count in ("0", "104", "nine"):
        assert fails("N", count) == 0
    for hub.error in (ConnectionError("offline"), OSError("No space left on device"), Exception):
        assert fails("check the network and the disk .*, then run this again") == 1
    hub.error, hub.lost_bytes = None, 10
    assert fails("fineweb_val_000000.bin is incomplete, or has another SHA-256") == 1
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    fails("pip install huggingface_hub")


def test_a_failed_download_keeps_complete_shards(tmp_path, hub, monkeypatch, capsys):
    monkeypatch.setattr("shutil.disk_usage", lambda _: types.SimpleNamespace(free=1.23e9))
    argv = ["--dir", str(tmp_path)]
    cached_fineweb10B.main(["1", *argv])
    hub.error = RuntimeError("cannot find it in the cache")
    hub.error.__cause__ = OSError(errno.ENOSPC, "No space\nleft")
    assert T.report_errors(lambda: cached_fineweb10B.main(["4", *argv])) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: cannot download: OSError: [Errno 28] No space left: check the ")
    assert "1.2 GB are free" in line and "3 of 5 shards (0.2 GB each) are missing in" in line
    names = {"fineweb_train_000001.bin", "fineweb_val_000000.bin", "hashes.json"}
    assert {path.name for path in tmp_path.iterdir()} >= names
    hub.error = None
    cached_fineweb10B.main(["2", *argv])
    names |= {"fineweb_train_000002.bin", ".lock"}
    assert {path.name for path in tmp_path.iterdir()} == names


def test_parts_of_killed_downloads_are_removed(tmp_path, hub):
    name = "fineweb_val_000000.bin"
    (tmp_path / ".downloading").mkdir()
    (tmp_path / ".downloading" / name).write_bytes(b"incomplete")
    cached_fineweb10B.main(["1", "--dir", str(tmp_path)])
    assert not (tmp_path / ".downloading").exists()


def test_a_file_system_without_locks_gets_its_download(tmp_path, hub, monkeypatch):
    def flock(*_):
        raise BlockingIOError("no locks available")

    monkeypatch.setattr("fcntl.flock", flock)
    cached_fineweb10B.main(["1", "--dir", str(tmp_path)])
    assert len(hub.asked) == 2


def test_a_download_waits_for_another_and_fetches_nothing_twice(tmp_path, hub):
    def get(folder):
        cached_fineweb10B.main(["1", "--dir", str(folder)])

    get(tmp_path / "a")
    (tmp_path / "b").mkdir()
    with ThreadPoolExecutor(1) as pool:
        with open(tmp_path / "b/.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            second = pool.submit(get, tmp_path / "b")
            assert not wait([second], 0.2).done
            shutil.copytree(tmp_path / "a", tmp_path / "b", dirs_exist_ok=True)
        second.result()
    assert len(hub.asked) == 2


def test_shards_have_the_published_hashes_and_runs_report_it(tmp_path, hub, capsys):
    """Existing shards are checked once, and fetched again if their hashes differ."""

    def fetch(count="1") -> list[str]:
        hub.asked.clear()
        cached_fineweb10B.main([count, "--dir", str(tmp_path)])
        return hub.asked

    def provenance() -> str:
        streams = [T.TokenStream(tmp_path, split, 0) for split in ("train", "val")]
        cfg = types.SimpleNamespace(real_tokens=100, encoding="gpt2")
        shards = T.shards_until(cfg, streams[0], 9) | T.shards_until(cfg, streams[1], 9)
        return T.provenance(tmp_path, shards)

    train, val = (tmp_path / f"fineweb_{name}.bin" for name in ("train_000001", "val_000000"))
    shards.write_shard(train, np.arange(50, dtype=np.uint16))
    shards.write_shard(val, np.arange(60, dtype=np.uint16))  # not as published
    hub.offline = True
    assert fetch() == [] and provenance() == "unverified"
    assert "all complete; not verified, as the hashes could not be" in capsys.readouterr().out
    hub.offline = False
    assert fetch() == [val.name] and provenance() == "verified"
    assert capsys.readouterr().out.endswith("training shards, all complete\n")
    hub.offline = True
    assert fetch() == []
    shards.write_shard(train, np.arange(50, dtype=np.uint16)[::-1])
    assert provenance() == "unverified"
    (tmp_path / "hashes.json").write_text("[]")
    assert provenance() == "unverified"


def test_a_shard_with_another_hash_is_not_kept(tmp_path, hub):
    hub.sha256 = "0" * 64
    with pytest.raises(T.UserError, match="is incomplete, or has another SHA-256"):
        cached_fineweb10B.main(["1", "--dir", str(tmp_path)])
    assert not [*tmp_path.glob("*.bin")] and not (tmp_path / "hashes.json").exists()
    hub.offline = True
    with pytest.raises(T.UserError, match="ConnectionError: offline"):
        cached_fineweb10B.main(["1", "--dir", str(tmp_path)])
    assert not [*tmp_path.glob("*.bin")]
