"""The estimate of memory, the search for settings that fit, and its command line."""

import re
from dataclasses import replace

import fit
import pytest
from conftest import ROOT
from programs import FakeMesh, fake_devices, mesh_of

import train_gpt as T

RECORD = T.Config()
GIB = 2**30
HARDWARE = (ROOT / "records/HARDWARE.md").read_text()


def settings_on(kind: str, devices: int = 1, cfg=RECORD, **options) -> list[str] | None:
    """Return the settings that settings_that_fit finds for devices of a "KIND:GIB"."""
    mesh = FakeMesh(fake_devices(*[kind] * devices, **options))
    return fit.settings_that_fit(cfg, mesh, T.memory_limit(mesh))


# ---- The estimate ------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["TPU v6 lite:31.25", "H100:59.3"])
def test_kept_arrays_are_the_least_that_a_program_needs(kind):
    """The figures of the trainer's own expected_bytes are the same."""
    for devices in (1, 8):
        mesh = FakeMesh(fake_devices(*[kind] * devices))
        found = fit.expected_bytes(RECORD, mesh)
        keys = {str(key): key for key in [*T.keys_of_steps(RECORD), "finish", "eval"]}
        assert found.keys() == keys.keys()
        assert all(found[name] >= T.held_bytes(RECORD, mesh, keys[name]) for name in keys)
        assert T.expected_bytes(RECORD, mesh) == found


@pytest.mark.parametrize("settings, less", [
    ("recompute=1", {"grads3"}),
    ("without=ngrams", {"grads3", "eval", "tables2-2-2-2"}),
    ("micro_tokens=24576", {"grads3"}),
    ("val_row=65536 val_batch=524288", {"eval"}),
    ("rows_at_once=65536", {"tables2-2-2-2"}),
    ("whole_loss=never", {"grads3"}),
])  # fmt: skip
def test_settings_reduce_the_estimate_of_the_programs_that_they_concern(settings, less):
    mesh = FakeMesh(fake_devices("H100:59.3"))
    before = T.override(RECORD, ["whole_loss=always"])
    after = T.for_devices(T.override(before, settings.split()), 1)
    found = [fit.expected_bytes(cfg, mesh) for cfg in (before, after)]
    assert all(found[1][name] < found[0][name] for name in less)


def test_a_named_device_replaces_the_devices_of_the_mesh():
    (gpu,) = fake_devices("H100:59.3")
    on_cpu = fit.expected_bytes(RECORD, mesh_of(1), gpu)
    assert on_cpu == fit.expected_bytes(RECORD, FakeMesh([gpu]))


# ---- The search --------------------------------------------------------------------------------

# GiB of a device, and figures of its compiler for the largest program with all other arrays in
# memory, but without the n-gram table.
CHIPS = [
    ("TPU v6 lite", 1, 31.25, 21.8),
    ("TPU v5 lite", 8, 15.75, 11.9),
    ("H100", 1, 59.3, 24.7),
]


@pytest.mark.parametrize("name, devices, gib, other_arrays", CHIPS)
def test_the_ngram_table_is_as_large_as_fits(name, devices, gib, other_arrays):
    """By figures of the compiler 2 GiB stay free, and at most 1.2 GiB more."""
    (setting,) = settings_on(f"{name}:{gib}", devices)
    fits = T.override(RECORD, [setting])
    assert setting.startswith("ngram_rows=")
    table = fits.ngram_rows * (2 * RECORD.width + 4) / devices / GIB
    assert 0 <= gib - 2 - other_arrays - table <= 1.2
    mesh = FakeMesh(fake_devices(*[f"{name}:{gib}"] * devices))
    sizes = [
        max(fit.expected_bytes(replace(fits, ngram_rows=fits.ngram_rows + more), mesh).values())
        for more in (0, 2**16)
    ]
    assert sizes[0] <= T.usable(gib * GIB) < sizes[1]
    assert settings_on(f"{name}:{gib}", devices, fits) == []


VALIDATION, AGAIN = "val_row val_batch", "recompute rows_at_once"


@pytest.mark.parametrize("gib, settings", [
    (59.3, "ngram_rows"),  # H100
    (29.6, "ngram_rows"),  # A100 of 40 GB
    (23.5, f"ngram_rows {VALIDATION} {AGAIN}"),  # RTX 5090
    (17.7, f"ngram_rows {VALIDATION} {AGAIN} table_every"),  # RTX 4090
    (16.5, f"ngram_rows {VALIDATION} {AGAIN} table_every micro_tokens"),  # L4
    (10.9, f"without {AGAIN} table_every micro_tokens {VALIDATION}"),  # as a T4 with kernels
])  # fmt: skip
def test_less_memory_needs_more_settings_and_batches_stay(gib, settings):
    found = settings_on(f"GPU:{gib}")
    assert [item.partition("=")[0] for item in found] == settings.split()
    cfg = T.override(RECORD, found)
    assert cfg.ngram_rows >= 400_000 or not cfg.ngram_rows
    fits = T.for_devices(cfg, 1)
    T.check_memory(fits, FakeMesh(fake_devices(f"GPU:{gib}")))
    longest = max(stage.row_tokens for stage in fits.stages)
    assert longest == min(cfg.micro_tokens, 49_152)
    for stage, before in zip(fits.stages, RECORD.stages, strict=True):
        assert stage.batch_tokens == before.batch_tokens and stage.rows == fits.stages[0].rows


def test_settings_are_added_to_disabled_ideas():
    cfg = T.override(RECORD, ["without=xsa"])
    found = settings_on("T4:10.9", cfg=cfg)
    assert found[0] == "without=ngrams" and T.override(cfg, found).without == "xsa,ngrams"


GPU_ROWS = re.findall(r"^\| one (.*) \| `(.*)` \| ([\d.]+) of ([\d.]+) \|", HARDWARE, re.M)


@pytest.mark.parametrize("name, settings, size, gib", GPU_ROWS)
def test_settings_in_the_table_are_those_that_fit(name, settings, size, gib):
    capability = "7.5" if "T4" in name else "8.0"
    assert settings_on(f"GPU:{gib}", capability=capability) == settings.split()
    mesh = FakeMesh(fake_devices("GPU", capability=capability))
    fits = T.for_devices(T.override(RECORD, settings.split()), 1)
    assert f"{max(fit.expected_bytes(fits, mesh).values()) / GIB:.1f}" == size
    assert len(GPU_ROWS) == 7


# ---- Commands ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind, row", [
    ("8 x TPU v6 lite", "TPU v6e-8"), ("8 x NVIDIA H100", "8xH100"), ("1 x NVIDIA H200", "one H200")
])  # fmt: skip
def test_training_times_are_those_of_the_table(kind, row):
    number, unit, how = re.match(r"(\d+) (\w+), (\w+)", fit.TIMES[kind]).groups()
    line = re.search(rf"^\| {row} \| \|.*$", HARDWARE, re.M)[0]
    assert how in line and re.search(rf" {number}(\.\d)? {unit} ", line)
    assert len(fit.TIMES) == 3


@pytest.fixture
def command(capsys):
    """Return a function: words of the command line -> (status, output, errors)."""

    def run(*words):
        status = T.report_errors(lambda: fit.main([*words]))
        return status, *capsys.readouterr()

    return run


def test_the_command_for_this_machine(machine, command):
    machine(*["TPU v6 lite:31.25"] * 8)
    start = T.command_for(T.__file__, "speedrun")
    note = "(8 x TPU v6 lite with 31.2 GiB: 67 s, predicted)"
    assert command() == (0, f"{start}\n{note}\n", "")
    status, out, _ = command("speedrun", "--set", "devices=4")
    first, second, _ = out.split("\n")
    assert status == 0 and re.fullmatch(rf"{start} --set devices=4 ngram_rows=\d+", first)
    assert second.startswith("(4 x TPU v6 lite with 31.2 GiB: records/HARDWARE.md")


def test_a_machine_without_enough_memory_is_refused(machine, command):
    machine("L4:4")
    status, out, err = command()
    assert (status, out) == (2, "")
    assert err == "error: speedrun does not fit 1 x L4 with 4.0 GiB: use more devices, or tiny\n"
    assert command("tiny")[0] == 0


def test_a_device_that_does_not_report_its_memory_fits(machine, command):
    (gpu,) = machine("H100")
    gpu.memory_stats = lambda: {}
    status, out, _ = command()
    assert status == 0 and "(1 x H100: " in out and "--set" not in out


def test_memory_of_a_gpu_that_is_not_here_can_be_given(command):
    status, out, err = command()
    assert status == 2 and "no accelerator here: name a GPU by --gib N" in err
    status, out, err = command("--gib", "59.4")
    row = re.search(r"^\| one A100, 80 GB \| `(.*?)`", HARDWARE, re.M)[1]
    assert (status, err) == (0, "")
    assert f" speedrun --set {row}\n(1 x NVIDIA GPU with 59.4 GiB: " in out
    assert "does not fit" in command("--gib", "3")[2]


def test_settings_of_the_command_line_are_kept_and_checked(command):
    _, out, _ = command("--gib", "59.4", "--set", "steps=100", "without=xsa")
    assert " speedrun --set steps=100 without=xsa ngram_rows=" in out
    assert "unknown key 'stepps'" in command("--gib", "59.4", "--set", "stepps=1")[2]


@pytest.mark.parametrize("kind, devices, form", [
    ("L4:4", 1, "^speedrun does not fit 1 x L4 with 4.0 GiB: use more devices, or tiny"),
    ("NVIDIA H100:59.3", 1, r"10B.py 9 && .* --set ngram_rows=\d+ \(.*: records/HARDWARE.md has"),
    ("NVIDIA H200:104.8", 1, r"10B.py 9 && .* speedrun \(.*: 6 minutes, calculated from"),
    ("NVIDIA H100:59.3", 8, r"10B.py 9 && .* speedrun \(.*: 57 s, calculated from"),
])  # fmt: skip
def test_the_bare_command_suggests_the_speedrun_on_accelerators(machine, kind, devices, form):
    machine(*[kind] * devices)
    lines = []
    T.suggest_next(lambda line: lines.append(str(line)))
    text, speedrun = lines
    assert text == f"next, a text of your own: {T.command_for(T.__file__)} TEXT"
    assert re.search(form, speedrun)


def test_the_bare_command_suggests_a_text_on_cpus_or_without_the_tool(machine, monkeypatch):
    lines = []
    T.suggest_next(lines.append)
    machine("H200:104.8")
    monkeypatch.setattr(T, "records_tool", lambda name: None)
    T.suggest_next(lines.append)
    assert lines == [f"next, a text of your own: {T.command_for(T.__file__)} TEXT"] * 2


def test_show_has_a_line_about_memory_on_accelerators(machine, monkeypatch, capsys):
    """The same line each time."""
    machine(*["H100:59.3"] * 8)
    monkeypatch.setattr(T, "keep_programs", lambda cache: None)
    for _ in range(2):
        assert T.main(["speedrun", "--show"]) == 0
    out = capsys.readouterr().out
    half = len(out) // 2
    assert out[:half] == out[half:]
    assert re.search(r"\nit fits: about [\d.]+ of 59.3 GiB per device\n$", out)
