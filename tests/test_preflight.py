"""Preflight: what is read out of optimized programs, what is printed, and the real TPU compiler."""

import importlib.util
import json
import math
import os
import re
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import jax
import pytest
from conftest import ROOT
from programs import CFG, mesh_of, programs_of

import train_gpt as T

# As libtpu writes it, shortened: two loops, one inside the other; a conditional; collectives plain,
# started and as a fusion; kernels, one with attributes over three lines; a gather and a scatter.
HLO = """HloModule jit_step, is_scheduled=true

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[]{:T(128)} parameter(0)
  %b = f32[]{:T(128)} parameter(1)
  ROOT %sum = f32[]{:T(128)} add(%a, %b), backend_config={"estimated_cycles":"1000000"}
}

%fused (p: f32[8,4]) -> f32[8,4] {
  %p = f32[8,4]{1,0} parameter(0)
  ROOT %hidden = f32[8,4]{1,0} negate(%p), backend_config={"estimated_cycles":"1000000"}
}

%gather_in (table: bf16[100,16], ids: s32[8]) -> bf16[8,16] {
  %table = bf16[100,16]{1,0:T(8,128)(2,1)} parameter(0)
  %ids = s32[8]{0} parameter(1)
  ROOT %gather.1 = bf16[8,16]{1,0:T(8,128)(2,1)} gather(%table, %ids), offset_dims={1}
}

%scatter_in (zeros: f32[100,16], at: s32[8], rows: f32[8,16]) -> f32[100,16] {
  %zeros = f32[100,16]{1,0} parameter(0)
  %at = s32[8]{0} parameter(1)
  %rows = f32[8,16]{1,0} parameter(2)
  ROOT %scatter.1 = f32[100,16]{1,0} scatter(%zeros, %at, %rows), to_apply=%add
}

%all-reduce-scatter.3 (input: f32[1024]) -> f32[128] {
  %input = f32[1024]{0} parameter(0)
  %all-reduce.9 = f32[1024]{0} all-reduce(%input), replica_groups={{0,1,2,3,4,5,6,7}}
  ROOT %mine = f32[128]{0} dynamic-slice(%all-reduce.9), dynamic_slice_sizes={128}
}

%inner_body (t.1: (s32[], f32[8,4])) -> (s32[], f32[8,4]) {
  %t.1 = (s32[]{:T(128)}, f32[8,4]{1,0}) parameter(0)
  %x.1 = f32[8,4]{1,0} get-tuple-element(%t.1), index=1
  %tiny = f32[8,4]{1,0} fusion(%x.1), kind=kLoop, calls=%fused, \
backend_config={"estimated_cycles":"7","x":[]}
  ROOT %r.1 = (s32[]{:T(128)}, f32[8,4]{1,0}) tuple(%x.1, %tiny)
}

%inner_condition (t.2: (s32[], f32[8,4])) -> pred[] {
  %t.2 = (s32[]{:T(128)}, f32[8,4]{1,0}) parameter(0)
  %i.2 = s32[]{:T(128)} get-tuple-element(%t.2), index=0
  %other = s32[]{:T(128)} constant(99)
  %five = s32[]{:T(128)} constant(5), metadata={op_name="jit(f)"}
  ROOT %lt = pred[]{:T(512)} compare(%i.2, %five), direction=LT
}

%outer_body (t.3: (s32[], f32[8,4])) -> (s32[], f32[8,4]) {
  %t.3 = (s32[]{:T(128)}, f32[8,4]{1,0}) parameter(0)
  %while.1 = (s32[]{:T(128)}, f32[8,4]{1,0}) while(%t.3), condition=%inner_condition, \
body=%inner_body
  %attend.3 = f32[8,4]{1,0} custom-call(%while.1), custom_call_target="tpu_custom_call", \
backend_config={"custom_call_config":{"body":"AAA"}}
  %all_gather.1 = f32[64,4]{1,0} all-gather(%attend.3), replica_groups=[1,8]<=[8], dimensions={0}
  ROOT %r.3 = (s32[]{:T(128)}, f32[8,4]{1,0}) tuple(%t.3, %attend.3)
}

%outer_condition (t.4: (s32[], f32[8,4])) -> pred[] {
  ROOT %t.4 = (s32[]{:T(128)}, f32[8,4]{1,0}) parameter(0)
}

%cheap (c.1: f32[8,4]) -> f32[8,4] {
  ROOT %c.1 = f32[8,4]{1,0} negate(%c.1), backend_config={"estimated_cycles":"10"}
}

%dear (c.2: f32[8,4]) -> f32[8,4] {
  ROOT %c.2 = f32[8,4]{1,0} negate(%c.2), backend_config={"estimated_cycles":"300"}
}

ENTRY %main.5_spmd (x: f32[8,4], table.1: bf16[100,16]) -> f32[8,4] {
  %x = f32[8,4]{1,0:T(8,128)} parameter(0)
  %while.2 = (s32[]{:T(128)}, f32[8,4]{1,0}) while(%x), condition=%outer_condition, \
body=%outer_body, backend_config={"known_trip_count":{"n":"3"}}
  %attend.4 = (f32[8,4]{1,0}, /*index=1*/f32[8]{0}) custom-call(%x), \
custom_call_target="tpu_custom_call", frontend_attributes={kernel_metadata={
"xprof_metadata":"{\\"block\\": 512}"
}}, metadata={op_name="a"}, backend_config={"custom_call_config":{"body":"BBB"}}
  %attend.5 = f32[8,4]{1,0} custom-call(%x), custom_call_target="tpu_custom_call", \
backend_config={"custom_call_config":{"body":"AAA"}}
  %pick = f32[8,4]{1,0} conditional(%x), branch_computations={%cheap, %dear, %cheap}
  %rows.1 = bf16[8,16]{1,0} fusion(%table.1), kind=kCustom, calls=%gather_in
  %table_grad = f32[100,16]{1,0} fusion(%rows.1), kind=kCustom, calls=%scatter_in
  %sort = (s32[8]{0:T(1024)S(1)}, s32[8]{0}) sort(%a, %b), dimensions={0}, to_apply=%add
  %fusion.8 = f32[128]{0:T(1024)S(1)} fusion(%x), kind=kCustom, calls=%all-reduce-scatter.3
  %reduce_scatter.2 = f32[4]{0} reduce-scatter(%x), replica_groups={{0,1,2,3},{4,5,6,7}}
  %all-gather-start = (f32[2]{0}, f32[16]{0}) all-gather-start(%x), replica_groups=[1,8]<=[8]
  %all-gather-done = f32[16]{0} all-gather-done(%all-gather-start)
  %all-reduce.1 = (f32[10]{0}, f32[]{:T(128)}) all-reduce(%x, %x), replica_groups=[1,8]<=[8]
  %permute = (f32[6]{0}, f32[6]{0}, u32[]{:S(2)}, u32[]{:S(2)}) collective-permute-start(%x)
  ROOT %last = f32[8,4]{1,0} fusion(%pick), kind=kLoop, calls=%fused, \
backend_config={"estimated_cycles":"20000"}
}
"""


def run(text: str):
    notes = set()
    return list(T.walk(text, notes)), notes


def test_walk_multiplies_loops_and_takes_the_dearest_branch():
    """5 times (condition) in 3 times (attributes); what is in fusions with an estimate is not."""
    instructions, notes = run(HLO)
    cycles = {one.name: (one.cycles, one.times) for one, _ in instructions}
    assert {name: x for name, x in cycles.items() if x[0]} == {
        "tiny": (7, 15),
        "c.2": (300, 1),
        "last": (20_000, 1),
    }
    assert {one.name for one, _ in instructions if one.in_loop} >= {"tiny", "attend.3", "while.1"}
    assert not {one.name for one, _ in instructions if one.in_loop} & {"attend.4", "x", "while.2"}
    assert notes == set()


def test_walk_counts_a_loop_of_unknown_length_once_and_says_so():
    instructions, notes = run(HLO.replace("direction=LT", "direction=NE"))
    assert {one.name: one.times for one, _ in instructions}["tiny"] == 3
    assert notes == {"loop while.1, of unknown length, is counted once"}


def test_instructions_keep_their_attributes_over_line_breaks():
    instructions, _ = run(HLO)
    kernel = next(one for one, _ in instructions if one.name == "attend.4")
    assert kernel.shape == "(f32[8,4]{1,0}, /*index=1*/f32[8]{0})"
    assert '"body":"BBB"' in kernel.rest and kernel.operands() == ["x"]


def test_collectives_of_all_spellings():
    found = T.collectives(run(HLO)[0], 8)
    total = {kind: (x["count"], x["bytes"], x["largest_bytes"]) for kind, x in found.items()}
    assert total == {
        "all-gather": (3 + 1, 3 * 64 * 4 * 4 + 16 * 4, 64 * 4 * 4),
        "reduce-scatter": (2, 1024 * 4 + 4 * 4 * 4, 1024 * 4),
        "all-reduce": (1, 11 * 4, 11 * 4),
        "collective-permute": (1, 6 * 4, 6 * 4),
    }
    assert {kind for kind, x in found.items() if x["in_loop"]} == {"all-gather"}
    assert found["all-reduce"]["sent_bytes"] == round(2 * 7 / 8 * 44)
    assert found["reduce-scatter"]["sent_bytes"] == 7 * 128 * 4 + 3 * 4 * 4
    assert found["collective-permute"]["sent_bytes"] == 24


def test_bytes_of_gathers_scatters_and_sorts():
    """Rows there and back, updates once and their rows twice, keys there and back."""
    assert T.moved_bytes(run(HLO)[0]) == 2 * 8 * 16 * 2 + 3 * 8 * 16 * 4 + 2 * 2 * 8 * 4


@pytest.mark.parametrize(
    ("shape", "size"),
    [
        ("f32[]{:T(128)}", 4),
        ("bf16[40,768]{1,0:T(8,128)(2,1)S(1)}", 40 * 768 * 2),
        ("(pred[3]{0}, s4[8]{0}, f8e4m3fn[5]{0}, token[])", 3 + 4 + 5),
        ("f32[0,8]{1,0}", 0),
    ],
)
def test_array_bytes(shape, size):
    assert T.array_bytes(shape) == size


# ------------------------------------------------------------------------------------------------
# Schedules of kernels
# ------------------------------------------------------------------------------------------------

# As libtpu writes it: a bundle can go on over lines, a `>` can be missing inside a loop (0x8), and
# an outer loop's exit test can stand in the inner loop (0x7, with a predicate).
SCHEDULE = """= control target key start
LB: loop body
= control target key end

     0   :  { %s1 = smov 0  ;;  %p9 = scmp.ge.s32.totalorder %s0, 1 }
   0x1   :  { %2 = dma.hbm_to_vmem [thread:$0]  /*
base_bounds: (1, 385)
hlo: attend */ }
   0x2 LB: > { %s194 = sadd.s32 4294967295, %s357 /* iteration index, stage = 1 */ }
   0x3 PF: > { %s3 = smov 0 }
   0x4 LB: >> { %s5 = smov 0 }
   0x5 LB: >>> { %s7 = sadd.s32 1, %s6 }
   0x6   : >>> { %p104 = scmp.ge.s32.totalorder %s7, 11 /* loop exit test */ }
   0x7   : >>> { %p97 = scmp.ge.s32.totalorder (%p104), %s5, 7 /* loop exit test */ }
   0x8   : >> { %106 = sbr.rel (!%p104) target = $region71 }
   0x9   : >>> { %v113 = vadd.f32 %v1, %v2 } /* End region 71 */
   0xa   : > { %99 = sbr.rel (!%p97) target = $region82 }
   0xb   : > { %p11 = scmp.ge.s32.totalorder %s409, 6 /* loop exit test */ }
   0xc   :  { %13 = sbr.rel (!%p11) target = $region93 }
   0xd LB: > { %p12 = scmp.ge.s32.totalorder %s409, 2 /* loop exit test */ }
   0xe   :  { %14 = vst [vmem:[#allocation3] sm:$0xff] %v128 }
"""


def test_kernel_bundles_multiplies_loops():
    inner, middle, outer = 5, 1, 4  # 0x5 to 0x9; 0x4; 0x2, 0x3, 0xa, 0xb
    want = 2 + 6 * (outer + 7 * (middle + 11 * inner)) + 1 + 2 * 1 + 1
    assert T.kernel_bundles(SCHEDULE) == (want, 0)


def test_kernel_bundles_counts_loops_that_depend_on_data_once():
    text = SCHEDULE.replace("%s409, 2 /* loop exit test */", "%s409, %s8")
    bundles, unknown = T.kernel_bundles(text)
    assert (bundles + 1, unknown) == (T.kernel_bundles(SCHEDULE)[0], 1)
    assert T.kernel_bundles("") == (0, 0)


@pytest.fixture
def schedules(tmp_path):
    """Two kernels' schedules and what else libtpu leaves there."""
    one = "     0   :  { %s1 = smov 0 }\n"
    for name, text in {
        "1795-attend.3-01-final_bundles.txt": 100 * one,
        "1795-attend.4-01-final_bundles.txt": 40 * one,
        "1795-attend.4-00-schedule-analysis_final_bundles.txt": 9 * one,
        "1795-fusion.8-01-final_bundles.txt": 1000 * one,
        "1795-TLP-hlo.txt": "",
    }.items():
        (tmp_path / name).write_text(text)
    return tmp_path


def test_kernels_without_a_schedule_count_as_those_with_the_same_code(schedules):
    """attend.3 three times, attend.4, and attend.5, which is attend.3 under another name."""
    notes = set()
    cycles = T.kernel_cycles(run(HLO)[0], schedules, notes)
    assert cycles == round(1.77 * (3 * 100 + 40 + 100)) and not notes
    assert list(schedules.iterdir()) == []


def test_kernels_with_other_code_count_as_the_dearest_of_the_same_function(schedules):
    head, tail = HLO.split("%attend.5 = ")
    instructions, _ = run(f"{head}%attend.5 = {tail.replace('AAA', 'CCC')}")
    assert T.kernel_cycles(instructions, schedules, set()) == round(1.77 * (3 * 100 + 40 + 100))


def test_no_schedule_means_no_prediction(tmp_path):
    notes = set()
    assert T.kernel_cycles(run(HLO)[0], tmp_path, notes) is None
    assert notes == {"kernel attend.3 has no schedule: no prediction"}
    assert T.kernel_cycles(run(HLO.replace("tpu_custom_call", "Other"))[0], tmp_path, set()) == 0


# ------------------------------------------------------------------------------------------------
# The whole of preflight, with programs that are there already
# ------------------------------------------------------------------------------------------------


@pytest.fixture
def absent(monkeypatch):
    """preflight for 8 devices, with programs that are there already; name -> error to raise."""
    programs, errors = programs_of(CFG, 8), {}

    def lower(cfg, variant, mesh):
        assert (cfg, mesh) == (CFG, mesh_of(8))

        def compile_():
            if variant.name in errors:
                raise jax.errors.JaxRuntimeError(errors[variant.name])
            return programs[variant]

        return SimpleNamespace(compile=compile_)

    monkeypatch.setattr(T, "absent_devices", lambda target: jax.devices())
    monkeypatch.setattr(T, "lower_variant", lower)
    return errors


def test_preflight_reports_every_program_of_the_run(absent, tmp_path):
    lines = []
    assert T.preflight(CFG, "v6e-8", tmp_path / "dump", lines.append) is True
    report = json.loads((tmp_path / "dump/preflight.json").read_text())
    counts = T.executions(CFG)
    assert [row["name"] for row in report["variants"]] == [variant.name for variant in counts]
    assert [row["steps"] for row in report["variants"]] == list(counts.values())
    assert [row["tokens_per_step"] for row in report["variants"]] == [256, 0, 0, 512, 512]
    assert (report["total_steps"], report["total_tokens"]) == (8, 3 * 256 + 5 * 512)
    assert (report["devices"], report["target"], len(lines)) == (8, "v6e-8", 1 + 5 + 2)
    for row in report["variants"]:
        assert "HloModule" in (tmp_path / "dump" / row["hlo"]).read_text()
        assert row["bytes"]["arguments"] > 0


def test_preflight_counts_the_state_beside_programs_that_do_not_take_it(
    absent, monkeypatch, tmp_path
):
    T.preflight(CFG, "v6e-8", tmp_path, list().append)
    rows = json.loads((tmp_path / "preflight.json").read_text())["variants"]
    state = T.abstract_state(CFG, mesh_of(8))
    a_device = sum(
        4 * x.size // (8 if x.sharding.spec == T.P("data") else 1) for x in jax.tree.leaves(state)
    )
    table = T.param_table(CFG).values()  # and whole gradients of one step wait for Adam's next one
    a_device += sum(4 * math.prod(row.shape) for row in table if row.optimizer == "adam")
    copies = sum(4 * math.prod(row.shape) for row in table)  # of before an update, beside it
    assert {row["name"]: row["resident_bytes"] for row in rows} == {
        row["name"]: copies if "update" in row["name"] else a_device for row in rows
    }
    most = max(row["bytes"]["peak"] + row["resident_bytes"] for row in rows)
    for limit, fits in ((most, True), (most - 1, False)):
        hardware = T.Hardware(None, limit, 1e12, 1e11)
        monkeypatch.setitem(T.HARDWARE, jax.devices()[0].device_kind, hardware)
        assert T.preflight(CFG, "v6e-8", None, list().append) is fits


def test_preflight_goes_on_after_a_program_that_does_not_fit(absent):
    lines, name = [], T.step_variants(CFG, 3)[0].name
    absent[name] = "RESOURCE_EXHAUSTED: too large.\n  Used 40.1G of 31.2G hbm.\n  and more"
    assert T.preflight(CFG, "v6e-8", None, lines.append) is False
    assert lines[-1] == f"{name} does not fit: Used 40.1G of 31.2G hbm." and len(lines) == 8
    absent[name] = "INTERNAL: a bug"
    with pytest.raises(jax.errors.JaxRuntimeError, match="a bug"):
        T.preflight(CFG, "v6e-8", None, lines.append)


def test_the_report_is_whole_labelled_and_fits_a_terminal(absent, monkeypatch):
    """With the facts of a TPU, and estimates of HLO instead of none."""
    lines, ms = [], 1.75e6  # cycles
    instructions, _ = run(HLO.replace("20000", "2000000"))
    v6e = T.HARDWARE["TPU v6 lite"]._replace(peak=1e12)
    monkeypatch.setitem(T.HARDWARE, jax.devices()[0].device_kind, v6e)
    monkeypatch.setattr(T, "walk", lambda text, notes: instructions)
    monkeypatch.setattr(T, "kernel_cycles", lambda *args: round(2 * ms))
    assert T.preflight(CFG, "v6e-8", None, lines.append) is True
    attention, first, second, *compiled, report, verdict = lines
    assert attention == "attention: xla (the reference)"
    assert re.fullmatch(r"grads-b256-\S+: 1 row at a time, about 0.0 of 33.6 GB", first)
    assert second.startswith("grads-b512-")
    assert [line.split()[0] for line in compiled] == [v.name for v in T.executions(CFG)]
    assert verdict == "all fit the 31.25 GiB of a device"
    assert max(map(len, report.splitlines())) <= 100
    cycles = 2_000_000 + 300 + 15 * 7 + 2 * ms
    costs = next(x for x in report.splitlines() if x.startswith("update-muon ") and "%" in x)
    assert costs.split()[3:6] == [f"{cycles / 1e6:.1f}", "3.5", f"{cycles / ms:.1f}"]
    train = 2 * 8 * cycles / 1.75e9
    assert f"predicted {train:.1f} s" in report and "not measured" in report
    need = 512 / (2 * cycles / 1.75e9)  # the largest batch in the time of two programs
    assert f"must sustain {need:,.0f} tokens/s" in report
    assert "0.295 s" in report and "upper bound" in report and "12 reduce" not in report


def test_without_estimates_there_is_no_prediction(absent, monkeypatch, tmp_path):
    lines = []
    monkeypatch.setitem(T.HARDWARE, jax.devices()[0].device_kind, T.HARDWARE["TPU v6 lite"])
    assert T.preflight(CFG, "v6e-8", tmp_path, lines.append) is True
    report = json.loads((tmp_path / "preflight.json").read_text())
    assert {row["predicted_ms"] for row in report["variants"]} == {None}
    assert report["predicted"]["train_seconds"] is None and "training    unknown" in lines[-2]


@pytest.mark.parametrize(
    ("message", "over"),
    [
        (
            "Ran out of memory\n  Used 40.25G of 31.25G hbm. Exceeded by 9.00G.",
            "9.00 GiB over the 31.25 GiB of a device, Used 40.25G",
        ),
        ("\nUsed 512.5M of 1G", "Used 512.5M of 1G"),
        ("Out of memory", "RESOURCE_EXHAUSTED: Out of memory"),
    ],
)
def test_a_refused_program_says_by_how_much(absent, monkeypatch, tmp_path, message, over):
    lines, name = [], "update-muon"
    monkeypatch.setitem(T.HARDWARE, jax.devices()[0].device_kind, T.HARDWARE["TPU v6 lite"])
    absent[name] = f"RESOURCE_EXHAUSTED: {message}"
    assert T.preflight(CFG, "v6e-8", tmp_path, lines.append) is False
    assert lines[-1].startswith(f"{name} does not fit: {over}")
    row = json.loads((tmp_path / "preflight.json").read_text())["variants"][1]
    contract = {"name", "steps", "tokens_per_step", "compile_seconds", "flops", "bytes"}
    assert row.keys() >= contract | {"device_bytes_limit", "hlo"} and row["hlo"] is None
    assert row["bytes"].keys() == {"arguments", "outputs", "aliased", "temporary", "peak"}


def test_the_exit_status_says_whether_it_fits(absent, capsys):
    arguments = ["tiny", "--preflight", "v6e-8"]
    for fits in (True, False):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(T, "preflight", lambda *args, fits=fits: fits)
            assert T.main(arguments) == (0 if fits else 1)


def test_preflight_leaves_no_folder_and_no_flags_behind(monkeypatch):
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--mine=1")
    with pytest.raises(KeyboardInterrupt), T.schedule_dump() as folder:
        assert os.environ["LIBTPU_INIT_ARGS"].startswith(f"--mine=1 --xla_jf_dump_to={folder}")
        assert folder.is_dir()
        raise KeyboardInterrupt
    assert not folder.exists() and os.environ["LIBTPU_INIT_ARGS"] == "--mine=1"


@pytest.mark.parametrize(("target", "package"), [("v6e-8", "jax[tpu]"), ("h100x8", "jax-cuda13")])
def test_preflight_says_what_to_install(monkeypatch, target, package):
    monkeypatch.setattr(T.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(T.UserError, match=re.escape(package)):
        T.absent_devices(target)


@pytest.mark.parametrize("target", ["v6e", "v6e-3", "v6e:", "2x4", "gpu"])
def test_preflight_refuses_unknown_targets(target):
    with pytest.raises(T.UserError, match="use v6e-1, v6e-4, v6e-8, h100x8 or a TPU topology"):
        T.absent_devices(target)


def test_links_of_the_device_with_the_fewest():
    mesh = [SimpleNamespace(coords=(x, y, 0)) for y in range(4) for x in range(2)]
    assert T.link_count(mesh) == 2 and T.link_count(mesh[:2]) == 1 and T.link_count(mesh[:1]) == 0
    assert T.link_count([SimpleNamespace(id=n) for n in range(8)]) == 1  # a switch


# ------------------------------------------------------------------------------------------------
# The real compiler for TPUs: no TPU is needed, but libtpu
# ------------------------------------------------------------------------------------------------

libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason='needs libtpu: pip install "jax[tpu]"'
)
SCRIPT = """
import sys
from contextlib import nullcontext
from pathlib import Path
import train_gpt as T
preset, names, dump, schedules, *items = sys.argv[1:]
if not schedules:
    T.schedule_dump = lambda: nullcontext(Path(dump, "none"))
cfg = T.PRESETS[preset]
for item in items:
    cfg = T.override(cfg, *item.split("=", 1))
cfg = T.validate(cfg)
wanted = {v: n for v, n in T.executions(cfg).items() if v.name in names.split(",")}
T.executions = lambda cfg: wanted
sys.exit(not T.preflight(cfg, "v6e-8", Path(dump)))
"""


def start(folder, preset, names, *items, schedules=True):
    """Preflight of some programs in a process of its own: libtpu is loaded once a process.

    Without schedules of kernels there are no costs, but it takes a quarter less time.
    """
    arguments = [sys.executable, "-c", SCRIPT, preset, ",".join(names), str(folder)]
    arguments += ["yes" * schedules, *items]
    env = os.environ | {"PYTHONPATH": str(ROOT), "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
    env |= {"TMPDIR": str(folder)}
    return subprocess.Popen(arguments, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def finish(process, folder) -> tuple[dict, str]:
    """(preflight.json, what was printed) of a process that `start` began; all of it fits."""
    printed = process.communicate()[0].decode()
    assert process.returncode == 0, printed
    assert not list(folder.glob("preflight-*")), "the schedules are deleted"
    return json.loads((folder / "preflight.json").read_text()), printed


def kernels(text: str) -> list[str]:
    """Names of the Pallas kernels of a program, one for each call."""
    return re.findall(r"%([\w.\-]+) = [^\n]*custom_call_target=\"tpu_custom_call\"", text)


def elements(shape: str, dtype: str) -> int:
    """Of the largest array of `dtype` in an HLO type."""
    sides = re.findall(rf"\b{dtype}\[([\d,]*)\]", shape)
    return max((math.prod(int(n) for n in x.split(",") if n) for x in sides), default=0)


def float32_matmuls(text: str, size: int, parameters: set[int]) -> list[str]:
    """Matmuls that read or write float32 arrays of `size` numbers or more, but of no parameter's.

    In a fusion what counts is the fusion's result: within it, sums are float32 in any case.
    """
    found, computations = [], T.hlo_computations(text)[0]
    for one, scope in T.walk(text, set()):
        inside = computations[one.called("calls")] if one.op == "fusion" else scope
        matmuls = [x for x in inside.values() if x.op in ("dot", "convolution")]
        matmuls = matmuls if one.op == "fusion" else [x for x in matmuls if x.name == one.name]
        shapes = [inside[name].shape for x in matmuls for name in x.operands()]
        shapes += [one.shape] * bool(matmuls)
        counts = [elements(shape, "f32") for shape in shapes]
        if any(n >= size and n not in parameters for n in counts):
            found.append(f"{one.name}: {one.shape} of {shapes}")
    return found


def test_float32_matmuls_are_found():
    text = HLO.replace("negate(%p)", "convolution(%p, %p), window={}")
    found = [line.split(":")[0] for line in float32_matmuls(text, 32, set())]
    assert found == ["tiny", "last"]
    assert not float32_matmuls(text, 33, set()) and not float32_matmuls(text, 32, {32})
    rounded = text.replace("%tiny = f32", "%tiny = bf16").replace("%p = f32", "%p = bf16")
    found = [line.split(":")[0] for line in float32_matmuls(rounded, 32, set())]
    assert found == ["last"]


@libtpu
@pytest.mark.slow
def test_the_tpu_compiler_takes_the_programs_of_a_small_run(tmp_path):
    """End to end, in 20 s: kernels with schedules, estimates, collectives, a prediction."""
    names = ["grads-b1024-r128-w64-128-k3", "update-muon"]
    changes = "compute_dtype=bfloat16", "layers=3", "skip=(0,1)", "backout=1"
    changes += "long_layers=(2,)", "value_layers=(2,)"
    report, printed = finish(start(tmp_path, "tiny", names, *changes), tmp_path)
    grads, update = report["variants"]
    assert (report["device_kind"], report["devices"], report["links"]) == ("TPU v6 lite", 8, 2)
    assert kernels((tmp_path / grads["hlo"]).read_text())
    assert 0 < grads["kernel_cycles"] < grads["estimated_cycles"]
    assert 0 < grads["predicted_ms"] < 10 and grads["notes"] == [] and update["kernel_cycles"] == 0
    assert {*grads["collectives"]} == {"all-reduce"}
    assert {*update["collectives"]} >= {"reduce-scatter", "all-gather"}
    assert report["predicted"]["train_seconds"] > 0 and "all fit the 31.25 GiB" in printed


# The record with three layers, which have all that its eleven have (paired heads; no attention;
# long window, key offset and values): eleven take 14 minutes a program, and --preflight shows that
# they fit. Widths, tokens, rows, windows, tables and loss are the record's.
THREE = {
    "layers": 3,
    "paired_layers": (0,),
    "value_layers": (2,),
    "long_layers": (2,),
    "skip": (0, 1),
    "backout": 1,
}
RECORD = T.validate(replace(T.PRESETS["speedrun"], **THREE))
SMALLEST = ["grads-b131072-r16384-w128-384-k3", "update-muon-adam"]
LARGEST = ["grads-b393216-r49152-w768-1664-k1"]


@pytest.fixture(scope="module")
def record(tmp_path_factory):
    """{program of the speedrun: (its row, its optimized HLO)}: two processes beside each other."""
    folders = {tmp_path_factory.mktemp("preflight"): names for names in (SMALLEST, LARGEST)}
    items = [f"{key}={value}" for key, value in THREE.items()]
    begun = {
        folder: start(folder, "speedrun", names, *items, schedules=False)
        for folder, names in folders.items()
    }
    found = {}
    for folder, process in begun.items():
        for row in finish(process, folder)[0]["variants"]:
            found[row["name"]] = row, (folder / row["hlo"]).read_text()
    return found


@libtpu
@pytest.mark.slow
@pytest.mark.parametrize("name", SMALLEST + LARGEST)
def test_three_layers_of_the_record_fit_a_v6e_8(record, name):
    row, _ = record[name]
    assert 2**30 < row["bytes"]["peak"] + row["resident_bytes"] < 31.25 * 2**30


@libtpu
@pytest.mark.slow
@pytest.mark.parametrize("name", [SMALLEST[0], *LARGEST])
def test_gradients_of_the_record_use_the_kernel_and_bfloat16(record, name):
    """Forward and backward kernels in each layer that attends; weight gradients may be float32."""
    row, text = record[name]
    assert len(kernels(text)) >= 2 * len(RECORD.attention_layers)
    tokens = row["tokens_per_step"] // 8
    sizes = {math.prod(param.shape) for param in T.param_table(RECORD).values()}
    assert float32_matmuls(text, tokens * RECORD.width, sizes) == []


@libtpu
@pytest.mark.slow
@pytest.mark.parametrize("name", SMALLEST + LARGEST)
def test_collectives_of_the_record_are_the_expected_ones(record, name):
    """Gradients stay where they are made; an update scatters and gathers them, not in a loop."""
    row, _ = record[name]
    found = row["collectives"]
    assert not any(x["in_loop"] for x in found.values())
    if name.startswith("grads"):  # the loss alone
        assert sum(x["bytes"] for x in found.values()) < 1000
        return
    numbers = [math.prod(p.shape) for p in T.param_table(RECORD).values() if p.sharded]
    for kind in ("reduce-scatter", "all-gather"):
        assert sum(numbers) * 2 <= found[kind]["bytes"] <= 1.01 * sum(numbers) * 2  # bfloat16
        assert found[kind]["largest_bytes"] <= 1.01 * max(numbers) * 2
    others = sum(x["bytes"] for kind, x in found.items() if kind == "all-reduce")
    assert others < 0.01 * sum(numbers)
