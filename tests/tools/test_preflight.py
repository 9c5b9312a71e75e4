"""records/preflight.py: the counts in optimized programs, the report, and the real compilers.

By default the programs are short HLO texts in the form of libtpu. With --slow, libtpu compiles the
record for an absent v6e-8 (ten minutes on two cores), and jax's compiler for NVIDIA GPUs, if it is
installed, compiles it for eight H100s.
"""

import importlib.util
import itertools
import json
import math
import os
import re
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import jax
import preflight
import pytest
from conftest import ROOT
from programs import CFG, cuda_compiler, named

import train_gpt as T

GIB = 2**30
CHIP = preflight.HARDWARE["TPU v6 lite"]
FOUR = [*itertools.product(range(2), range(2))]


def v6e(x: int, y: int) -> list:
    """Return the devices of an absent mesh."""
    places = itertools.product(range(x), range(y))
    return [SimpleNamespace(device_kind="TPU v6 lite", coords=(*at, 0)) for at in places]


def estimate(cycles: int) -> str:
    return f'backend_config={{"estimated_cycles":"{cycles}"}}'


# A loop with a fused matmul and a kernel; two more kernels, one with attributes on three lines, one
# with the code of the first kernel; a gather without an estimate; a collective.
HLO = f"""HloModule m, is_scheduled=true
FunctionNames
1 "<module>"
2 "mlp.<locals>.half"
3 "norm"
FileLocations
1 {{file_name_id=1 function_name_id=1 line=1}}
2 {{file_name_id=1 function_name_id=2 line=2}}
3 {{file_name_id=1 function_name_id=3 line=3}}
StackFrames
1 {{file_location_id=1 parent_frame_id=1}}
2 {{file_location_id=2 parent_frame_id=2}}
3 {{file_location_id=3 parent_frame_id=3}}
4 {{file_location_id=1 parent_frame_id=3}}
%fused (p: f32[8,128]) -> f32[8,128] {{
  %p = f32[8,128]{{1,0}} parameter(0)
  %m = f32[8,128]{{1,0}} convolution(%p, %p), dim_labels=bf_oi->bf, \
metadata={{stack_frame_id=4}}, {estimate(10**6)}
  ROOT %n = f32[8,128]{{1,0}} negate(%m), metadata={{stack_frame_id=3}}
}}
%rows_of (table: f32[100,128], ids: s32[8]) -> f32[8,128] {{
  %table = f32[100,128]{{1,0}} parameter(0)
  %ids = s32[8]{{0}} parameter(1)
  ROOT %g = f32[8,128]{{1,0}} gather(%table, %ids), offset_dims={{1}}, slice_sizes={{1,128}}
}}
%less (t.2: (s32[], f32[8,128])) -> pred[] {{
  %t.2 = (s32[], f32[8,128]{{1,0}}) parameter(0)
  %i = s32[] get-tuple-element(%t.2), index=0
  %five = s32[] constant(5), metadata={{op_name="f"}}
  ROOT %lt = pred[] compare(%i, %five), direction=LT
}}
%body (t.1: (s32[], f32[8,128])) -> (s32[], f32[8,128]) {{
  %t.1 = (s32[], f32[8,128]{{1,0}}) parameter(0)
  %x.1 = f32[8,128]{{1,0}} get-tuple-element(%t.1), index=1
  %twice = f32[8,128]{{1,0}} fusion(%x.1), kind=kLoop, calls=%fused, \
metadata={{stack_frame_id=3}}, {estimate(7000)}
  %attend.3 = f32[8,128]{{1,0}} custom-call(%twice), custom_call_target="tpu_custom_call", \
backend_config={{"custom_call_config":{{"body":"AAA"}}}}
  ROOT %r.1 = (s32[], f32[8,128]{{1,0}}) tuple(%x.1, %attend.3)
}}
ENTRY %main (x: f32[8,128], table.1: f32[100,128], ids.1: s32[8]) -> f32[8,128] {{
  %x = f32[8,128]{{1,0}} parameter(0)
  %table.1 = f32[100,128]{{1,0}} parameter(1)
  %ids.1 = s32[8]{{0}} parameter(2)
  %w = (s32[], f32[8,128]{{1,0}}) while(%x), condition=%less, body=%body
  %attend.4 = f32[8,128]{{1,0}} custom-call(%x), custom_call_target="tpu_custom_call", \
frontend_attributes={{kernel_metadata={{
"xprof_metadata":"{{\\"block\\": 512}}"
}}}}, backend_config={{"custom_call_config":{{"body":"BBB"}}}}
  %attend.5 = f32[8,128]{{1,0}} custom-call(%x), custom_call_target="tpu_custom_call", \
backend_config={{"custom_call_config":{{"body":"AAA"}}}}
  %rows = f32[8,128]{{1,0}} fusion(%table.1, %ids.1), kind=kCustom, calls=%rows_of
  %sent = f32[1024]{{0}} all-gather(%x), replica_groups=[1,8]<=[8], dimensions={{0}}
  ROOT %last = f32[8,128]{{1,0}} add(%x, %rows), metadata={{stack_frame_id=3}}, {estimate(2)}
}}
"""


def run(text: str) -> list:
    """Return all instructions that an HLO module executes."""
    return list(preflight.walk(*preflight.hlo_computations(text)))


def schedules(folder: Path, **bundles: int) -> Path:
    """Write final schedules as libtpu does: kernel (with _ for a dot) -> number of bundles."""
    for name, count in bundles.items():
        text = count * "     0   :  { %s1 = smov 0 }\n"
        (folder / f"17-{name.replace('_', '.')}-01-final_bundles.txt").write_text(text)
    (folder / "17-TLP-hlo.txt").write_text("")
    return folder


def test_loops_multiply_and_fusions_are_one_instruction():
    found = {one.name: one for one in run(HLO)}
    estimated = {name: (one.times, one.cycles) for name, one in found.items() if one.cycles}
    assert estimated == {"twice": (5, 7000), "last": (1, 2)}
    assert found["attend.3"].times == 5 and found["attend.4"].times == 1
    assert '"body":"BBB"' in found["attend.4"].rest, "attributes on several lines"
    unknown = {one.name: one.times for one in run(HLO.replace("direction=LT", "direction=NE"))}
    assert unknown["twice"] == 1, "unknown length"
    offloaded = run(HLO.replace('"2"', f'"{2**63 - 1}"'))
    assert offloaded[-1].cycles == 0, "libtpu writes this for SparseCores"


def test_time_of_a_program_by_computing_links_and_moves(tmp_path):
    """Compare with manual sums. attend.5 has the code and the schedule of attend.3."""
    found = preflight.count(HLO, schedules(tmp_path, attend_3=10_000, attend_4=3), v6e(2, 4))
    assert list(tmp_path.iterdir()) == []
    array = 8 * 128 * 4 / CHIP.hbm
    mlp = 5 * 7350 / CHIP.clock
    kernels = 6 * 13_000 / CHIP.clock + 2 * array  # attend.4 is limited by its bytes
    assert found["predicted_ms"] == pytest.approx(1e3 * (mlp + kernels + 3 * array))
    assert found["link_floor_ms"] == pytest.approx(1e3 * 7 * 512 / 2 / CHIP.link)
    moves = 2 * array + 32 / CHIP.hbm
    assert found["moved_floor_ms"] == pytest.approx(1e3 * moves)
    seconds = {"mlp": mlp, "attend": kernels, "norm": 3 * array, "other": moves}
    assert {x: found["functions_ms"][x] for x in seconds} == pytest.approx(
        {x: 1e3 * value for x, value in seconds.items()}
    )
    waits = 1e3 * (5 * array + moves)  # 3 of the last instruction, 2 of attend.4
    bounds = {"code": 1e3 * mlp, "kernel": 1e3 * 6 * 13_000 / CHIP.clock, "memory": waits}
    assert {x: ms for x, ms in found["bound_ms"].items() if ms} == pytest.approx(bounds)
    again = schedules(tmp_path, attend_3=10_000, attend_4=3, rows=900, twice=4000)
    scheduled = preflight.count(HLO, again, v6e(2, 4))
    more = scheduled["predicted_ms"] - found["predicted_ms"]
    fewer = 5 * 1.05 * (7000 - 4000)
    assert scheduled["moved_floor_ms"] == 0
    assert scheduled["bound_ms"]["rows"] == pytest.approx(1e3 * 1.3 * 900 / CHIP.clock)
    assert more == pytest.approx(1e3 * (1.3 * 900 - fewer) / CHIP.clock), "gather, MLP"
    large = HLO.replace("[8,128]", "[4096,4096]")
    slow = preflight.count(large, schedules(tmp_path, attend_3=9, attend_4=3), v6e(2, 4))
    cycles = 1.05 * 2 * 4096**3 / 2**19  # instead of the estimate, 7,000
    assert slow["functions_ms"]["mlp"] == pytest.approx(5 * 1e3 * cycles / CHIP.clock)
    parts = sum(found[f"{part}_ms"] for part in ("predicted", "link_floor", "moved_floor"))
    assert found["low_ms"] < 0.9 * parts < 1.1 * parts < found["high_ms"]
    assert {*preflight.count(HLO, tmp_path, v6e(2, 4)).values()} == {None}, "no schedules"


# In the form of libtpu: a bundle can have several lines; a `>` can be missing in a loop (0x8), or
# all of them before an inner loop (0x3a); the exit test of an outer loop can be in the inner loop
# (0x7, with a predicate).
SCHEDULE = """= control target key start
LB: loop body

     0   :  { %s1 = smov 0  ;;  %p9 = scmp.ge.s32.totalorder %s0, 1 }
   0x1   :  { %2 = dma.hbm_to_vmem [thread:$0]  /*
hlo: attend */ }
   0x2 LB: > { %s194 = sadd.s32 4294967295, %s357 /* iteration index, stage = 1 */ }
   0x3 PF: > { %s3 = smov 0 }
   0x3a   :  {} /* End region 17 */
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


def test_bundles_of_a_schedule_are_multiplied_by_its_loops():
    inner, middle, outer = 5, 1, 5  # 0x5 to 0x9; 0x4; 0x2, 0x3, 0x3a, 0xa, 0xb
    once = 2 + 6 * (outer + 7 * (middle + 11 * inner)) + 1 + 1
    assert preflight.read_schedule(SCHEDULE) == once + 2
    of_data = SCHEDULE.replace("%s409, 2 /* loop exit test */", "%s409, %s8")
    assert preflight.read_schedule(of_data) == once + 1, "unknown length: once"
    fetches = of_data.replace("%p12 =", 2 * "%8 = dma.hbm_to_vmem  ;;  " + "%p12 =")
    assert preflight.read_schedule(fetches, rows=18) == once + 9, "one transfer per row"


def test_rows_and_table_of_a_gather():
    on_chip = HLO.replace("f32[100,128]{1,0}", "f32[100,128]{1,0:S(1)}")
    one, other = (next(x for x in run(text) if x.name == "rows") for text in (HLO, on_chip))
    assert preflight.fetched_rows(one) == 8 and preflight.fetched_rows(run(HLO)[-1]) == 0
    assert preflight.twin_key(one) != preflight.twin_key(other), "different code"


# A program with a placeholder for one instruction, and fused computations as on TPUs.
BYTES = """HloModule m, is_scheduled=true
%gathers (p: f32[8]) -> f32[64] {
  %p = f32[8]{0} parameter(0)
  ROOT %g = f32[64]{0} all-gather(%p), replica_groups=[1,8]<=[8]
}, execution_thread="sparsecore"
%updates (p.4: bf16[64,128], q.4: bf16[8,128], n: s32[]) -> (bf16[64,128], bf16[8,128]) {
  %p.4 = bf16[64,128]{1,0} parameter(0)
  %q.4 = bf16[8,128]{1,0} parameter(1)
  %n = s32[] parameter(2)
  %cast = bf16[64,128]{1,0} bitcast(%p.4)
  %u = bf16[64,128]{1,0} dynamic-update-slice(%cast, %q.4, %n, %n)
  ROOT %r.4 = (bf16[64,128]{1,0}, bf16[8,128]{1,0}) tuple(%u, %q.4)
}
%fresh (q.5: bf16[8,128], n.5: s32[]) -> bf16[64,128] {
  %q.5 = bf16[8,128]{1,0} parameter(0)
  %n.5 = s32[] parameter(1)
  %zero = bf16[] constant(0)
  %zeros = bf16[64,128]{1,0} broadcast(%zero), dimensions={}
  ROOT %u.5 = bf16[64,128]{1,0} dynamic-update-slice(%zeros, %q.5, %n.5, %n.5)
}
ENTRY %main (x: bf16[64,128]) -> f32[] {
  %x = bf16[64,128]{1,0:T(8,128)(2,1)} parameter(0)
  %near = bf16[64,128]{1,0:T(8,128)(2,1)S(1)} parameter(1)
  %ids = s32[8]{0} parameter(2)
  %n.0 = s32[] parameter(3)
  %row = bf16[8,128]{1,0} parameter(4)
  ROOT %one = INSTRUCTION
}
"""
X, ROW = 64 * 128 * 2, 8 * 128 * 2
KERNEL = 'custom_call_target="tpu_custom_call"'


@pytest.mark.parametrize(
    ("instruction", "size"),
    [
        ("bf16[64,128]{1,0} add(%x, %x)", 3 * X),
        ("bf16[64,128]{1,0:S(1)} add(%x, %near)", X),  # one operand in memory
        ("f32[64,6]{0,1:T(8,128)} add(%near, %near)", 128 * 8 * 4),  # padded tiles
        ("bf16[8,128]{1,0} gather(%x, %ids), offset_dims={1}", 2 * ROW + 32),
        ("bf16[64,128]{1,0} dynamic-update-slice(%x, %row, %n.0, %n.0)", 2 * ROW + 8),
        ("(bf16[64,128]{1,0}, bf16[8,128]{1,0:S(1)}) fusion(%x, %row, %n.0), calls=%updates",
         2 * ROW + 4),
        ("bf16[64,128]{1,0} fusion(%row, %n.0), kind=kLoop, calls=%fresh", X + ROW + 4),
        ("(bf16[64,128]{1,0:S(1)}, bf16[64,128]{1,0}, u32[]{:S(2)}) copy-start(%x)", 0),
        ("bf16[64,128]{1,0} copy-done(%x)", 0),
        (f"bf16[64,128]{{1,0}} custom-call(%x, %x, %near), {KERNEL}", 2 * X),
        (f"bf16[64,128]{{1,0}} custom-call(%x, %row), {KERNEL}, "
         "output_to_operand_aliasing={{}: (0, {})}", X + ROW),
        ("bf16[512,128]{1,0} all-gather(%x), replica_groups={{0,1,2,3,4,5,6,7}}", 0),
    ],
)  # fmt: skip
def test_bytes_of_memory_that_an_instruction_reads_and_writes(instruction, size):
    *_, one = run(BYTES.replace("INSTRUCTION", instruction))
    assert one.name == "one" and preflight.memory_bytes(one) == size


@pytest.mark.parametrize(
    ("instruction", "kind", "size", "sent"),
    [
        ("f32[64]{0} all-gather(%x), replica_groups=[1,8]<=[8]", "all-gather", 256, 224),
        ("f32[4]{0} reduce-scatter(%x), replica_groups={{0,1,2,3},{4,5,6,7}}", "reduce-scatter",
         64, 48),
        ("(f32[10]{0}, f32[]) all-reduce(%x, %x), replica_groups=[1,8]<=[8]", "all-reduce", 44, 77),
        ("s32[8,5]{1,0} all-to-all(%x), replica_groups=[1,8]<=[8]", "all-to-all", 160, 140),
        ("(f32[6]{0}, f32[6]{0}, u32[]) collective-permute-start(%x)", "collective-permute",
         24, 24),
    ],
)  # fmt: skip
def test_bytes_that_a_device_sends_in_a_collective(instruction, kind, size, sent):
    *_, one = run(BYTES.replace("INSTRUCTION", instruction))
    assert one.collective == kind and preflight.sent_bytes(one, 8) == (size, sent)


def played(*lines: str) -> float:
    """Return links_alone of a program. Each collective takes 100."""
    text = BYTES.replace("ROOT %one = INSTRUCTION", "\n".join(f"  %{line}" for line in lines))
    return preflight.links_alone(run(text), lambda one: one.cycles, lambda one: 100)


def test_work_between_start_and_done_hides_communication():
    start = "s = ((bf16[64,128], token[]), f32[64]{0}) call-start(%x), to_apply=%gathers"
    done = "d = f32[64]{0} call-done(%s)"
    work, more = (f"w = bf16[64,128]{{1,0}} negate(%x), {estimate(x)}" for x in (30, 130))
    assert played(work, start, done) == 100, "nothing to hide it"
    assert played(start, work, done) == 70 and played(start, more, done) == 0
    renamed = "r = (f32[8], f32[64]) bitcast(%s)", work, done.replace("%s", "%r")
    assert played(start, *renamed) == 70
    others = start.replace("s =", "s2 ="), more, done, "d2 = f32[64]{0} call-done(%s2)"
    assert played(start, *others) == 70, "one after the other"
    now = "now = f32[64]{0} all-gather(%x), replica_groups=[1,8]<=[8]"
    assert played(start, work, now, done) == 170


def test_a_call_in_three_pieces_starts_at_its_update():
    """libtpu of jax 0.12 writes calls of SparseCores in three pieces, libtpu of jax 0.10 in two."""
    two = (
        "s = ((bf16[64,128], token[]), f32[64]{0}) call-start(%x), to_apply=%gathers",
        "d = f32[64]{0} call-done(%s)",
    )
    three = (
        "s = ((), (), (s32[1]{0:T(128)S(2)})) call-start(), "
        'async_execution_thread="sparsecore", to_apply=%gathers, backend_config={"core_ids":["0"]}',
        'u = ((bf16[64,128]), f32[64]{0}) call-update(%s, %x), metadata={op_name="f"}',
        "d = f32[64]{0} call-done(%u)",
    )
    before, beside = (f"{x} = bf16[64,128]{{1,0}} negate(%x), {estimate(30)}" for x in "vw")
    assert played(before, two[0], beside, two[1]) == 70
    assert played(three[0], before, three[1], beside, three[2]) == 70
    update = three[1].replace("metadata", "replica_groups=mesh['d'=8] {'d'}, metadata")
    text = BYTES.replace("ROOT %one = INSTRUCTION", f"%{three[0]}\n  ROOT %{update}")
    *_, one = run(text.replace("[1,8]<=[8]", "mesh['d'=8] {'d'}"))
    assert one.name == "u" and one.operands == one.inputs() == [one.scope["x"]]
    assert (one.collective, preflight.sent_bytes(one, 8)) == ("all-gather", (256, 224))


# The update of a table by SparseCores, in the forms of both versions of libtpu.
SCATTER = """HloModule m, is_scheduled=true
%adds (p: f32[64,128], i: s32[8], q: f32[8,128]) -> f32[64,128] {
  %p = f32[64,128]{1,0} parameter(0)
  %i = s32[8]{0} parameter(1)
  %q = f32[8,128]{1,0} parameter(2)
  ROOT %u = f32[64,128]{1,0} scatter(%p, %i, %q), update_window_dims={1}
}, execution_thread="sparsecore"
%inner (p.1: f32[64,128], i.1: s32[8], q.1: f32[8,128]) -> f32[64,128] {
  %p.1 = f32[64,128]{1,0} parameter(0)
  %i.1 = s32[8]{0} parameter(1)
  %q.1 = f32[8,128]{1,0} parameter(2)
  ROOT %f = f32[64,128]{1,0} fusion(%p.1, %i.1, %q.1), kind=kCustom, calls=%adds
}, execution_thread="sparsecore"
%outer (p.2: f32[64,128], i.2: s32[8], q.2: f32[8,128]) -> f32[64,128] {
  %p.2 = f32[64,128]{1,0} parameter(0)
  %i.2 = s32[8]{0} parameter(1)
  %q.2 = f32[8,128]{1,0} parameter(2)
  %s.2 = ((f32[64,128], s32[8], f32[8,128]), f32[64,128]) call-start(%p.2, %i.2, %q.2), \
to_apply=%inner
  ROOT %d.2 = f32[64,128]{1,0} call-done(%s.2)
}, execution_thread="sparsecore"
ENTRY %main (table: f32[64,128], ids: s32[8], rows: f32[8,128]) -> f32[64,128] {
  %table = f32[64,128]{1,0} parameter(0)
  %ids = s32[8]{0} parameter(1)
  %rows = f32[8,128]{1,0} parameter(2)
  PIECES
}
"""


@pytest.mark.parametrize(
    "pieces",
    [
        ["%s = ((f32[64,128], s32[8], f32[8,128], token[]), f32[64,128]) "
         "call-start(%table, %ids, %rows), to_apply=%outer",
         "ROOT %d = f32[64,128]{1,0} call-done(%s)"],
        ["%s = ((), (), (s32[1]{0:T(128)S(2)})) call-start(), to_apply=%outer",
         "%u = ((f32[64,128]{1,0}, s32[8]{0}, f32[8,128]{1,0}), f32[64,128]{1,0}) "
         "call-update(%s, %table, %ids, %rows)",
         "ROOT %d = f32[64,128]{1,0} call-done(%u)"],
    ],
)  # fmt: skip
def test_a_table_update_by_sparsecores_moves_only_rows(pieces):
    """The update reads the new rows and the old rows, and writes the sums."""
    every = run(SCATTER.replace("PIECES", "\n  ".join(pieces)))
    assert sum(map(preflight.memory_bytes, every)) == 3 * 8 * 128 * 4 + 8 * 4
    assert [one.name for one in every if preflight.memory_bytes(one)] == ["f"]


def test_links_and_loads_of_a_mesh():
    """The two middle links of a v6e-8 carry half of an all-to-all; a v6e-256 has rings."""
    sides = {(1, 1): (0, 0), (1, 2): (1, 0.5), (2, 4): (2, 1), (8, 8): (2, 2), (16, 16): (4, 2)}
    for (x, y), figures in sides.items():
        mesh = v6e(x, y)
        assert preflight.network(mesh) == figures


@pytest.mark.parametrize(
    ("target", "topology", "bounds"),
    [
        ("v6e-1", "v6e:1x1", (1, 1, 1)),
        ("v6e-8", "v6e:2x4", (2, 4, 1)),  # one host
        ("v6e-16", "v6e:4x4", (2, 2, 1)),
        ("v6e-256", "v6e:16x16", (2, 2, 1)),
        ("v5e-4", "v5e:2x2", (2, 2, 1)),
        ("v5litepod-8", "v5e:2x4", (2, 4, 1)),  # Google's name of a v5e-8
        ("v5p-8", "v5p:2x2x1", (2, 2, 1)),  # four chips of two cores
        ("v5p-16", "v5p:2x2x2", (2, 2, 1)),
        ("v5p-128", "v5p:4x4x4", (2, 2, 1)),
        ("v4-8", "v4:2x2x1", (2, 2, 1)),
        ("v5e:2x4", "v5e:2x4", (2, 4, 1)),
    ],
)
def test_a_name_of_tpus_is_a_mesh_of_chips(target, topology, bounds):
    options = preflight.tpu_options(target)
    assert (options["topology_name"], options["chips_per_host_bounds"]) == (topology, bounds)
    assert (options.get("chip_config_name") == "megacore") == target.startswith("v4")
    assert preflight.gpu_options(target) is None
    assert preflight.tpu_options(target + "x") is None


def test_a_name_of_gpus_is_a_description_and_a_count():
    one, eight, two = map(preflight.gpu_options, ("a100-40x1", "h100x8", "h200x16"))
    assert [x["topology"] for x in (one, eight, two)] == ["1x1x1", "1x1x8", "1x2x8"]
    words = "major: 8 minor: 0", "core_count: 108 fpus_per_core: 64", "l2_cache_size: 41943040"
    words += "memory_bandwidth: 1555000000000", "shared_memory_per_block_optin: 166912"
    for word in words:
        assert word in one["target_config"]
    assert {*preflight.CORES} == {capability for _, capability, *_ in preflight.GPUS.values()}
    assert [preflight.gpu_options(x) for x in ("h100", "x8", "h100x-1", "v6ex8")] == 4 * [None]


# A matmul in a loop with a fused condition, a kernel, and an addition.
GPU_HLO = """HloModule m, is_scheduled=true
%gemm (p: bf16[4,512,1024], q: bf16[4,1024,2048]) -> bf16[4,512,2048] {
  %p = bf16[4,512,1024]{2,1,0} parameter(0)
  %q = bf16[4,1024,2048]{2,1,0} parameter(1)
  ROOT %d = bf16[4,512,2048]{2,1,0} dot(%p, %q), lhs_batch_dims={0}, lhs_contracting_dims={2}
}
%less (t.2: (s32[], bf16[4,512,2048])) -> pred[] {
  %t.2 = (s32[], bf16[4,512,2048]{2,1,0}) parameter(0)
  ROOT %fewer = pred[] fusion(%t.2), kind=kLoop, calls=%compared
}
%body (t.1: (s32[], bf16[4,512,2048])) -> (s32[], bf16[4,512,2048]) {
  %t.1 = (s32[], bf16[4,512,2048]{2,1,0}) parameter(0)
  %a = bf16[4,512,1024]{2,1,0} parameter(1)
  %b = bf16[4,1024,2048]{2,1,0} parameter(2)
  ROOT %product = bf16[4,512,2048]{2,1,0} fusion(%a, %b), kind=kCustom, calls=%gemm
}
ENTRY %main (x: bf16[65536,1024]) -> bf16[65536,1024] {
  %x = bf16[65536,1024]{1,0} parameter(0)
  %w = (s32[], bf16[4,512,2048]{2,1,0}) while(%x), condition=%less, body=%body, \
backend_config={"known_trip_count":{"n":"6"}}
  %kernel = bf16[8,8]{1,0} custom-call(%w), custom_call_target="__gpu$xla.gpu.triton", \
metadata={op_name="jit(f)/attend/pallas_call"}
  ROOT %sum = bf16[65536,1024]{1,0} add(%x, %x)
}
"""


def test_a_gpu_reaches_shares_of_its_data_sheet(tmp_path):
    """Compare with manual sums. Several GPUs, and GPUs with an unknown peak, have no times."""
    h200, a100, t4 = ([SimpleNamespace(device_kind=preflight.GPUS[x][0])] for x in
                      ("h200", "a100-80", "t4"))  # fmt: skip
    found = preflight.count(GPU_HLO, tmp_path, h200, attention=989e9)
    product, passed = 6 * 2 * 4 * 512 * 1024 * 2048 / 989e12 / 0.85, 3 * 2**27 / 4.8e12 / 0.7
    want = {"code": 1e3 * product, "kernel": 1 / 0.5, "memory": 1e3 * passed}
    assert found["bound_ms"] == pytest.approx(want)
    assert found["predicted_ms"] == pytest.approx(sum(want.values()))
    assert (found["link_floor_ms"], found["moved_floor_ms"]) == (0, 0)
    assert found["high_ms"] / found["predicted_ms"] == pytest.approx(1.25), "a measured GPU"
    other = preflight.count(GPU_HLO, tmp_path, a100)
    assert other["low_ms"] * 1.5 == pytest.approx(other["predicted_ms"]), "other GPUs"
    for devices in (2 * h200, t4):
        assert {*preflight.count(GPU_HLO, tmp_path, devices).values()} == {None}


def test_flops_of_attention_follow_from_its_windows():
    key = named(CFG, "grads1")
    stage = CFG.stages[key.stage]
    heads = [T.heads_of(CFG, i, stage.windows) for i, x in enumerate(CFG.layers) if x.attends]
    one = sum(x.count * x.window * (5 * x.qk_width + 4 * x.v_width) for x in heads)
    assert preflight.attention_flops(CFG, key) == 2 * stage.batch_tokens * one > 0
    assert preflight.attention_flops(CFG, "anvil") == 0


def test_memory_of_a_gpu_is_the_share_that_jax_takes(monkeypatch):
    """The share does not change the memory of a TPU."""
    variable = "XLA_PYTHON_CLIENT_MEM_FRACTION"
    kinds = "NVIDIA A100-SXM4-40GB", "TPU v6 lite"
    each = (SimpleNamespace(flat=[SimpleNamespace(device_kind=kind)]) for kind in kinds)
    gpu, tpu = (SimpleNamespace(devices=devices) for devices in each)
    monkeypatch.delenv(variable, raising=False)
    assert preflight.memory_of(gpu) == int(0.75 * 39.42 * GIB)
    monkeypatch.setenv(variable, ".92")
    assert preflight.memory_of(gpu) == int(0.92 * 39.42 * GIB)
    assert preflight.memory_of(tpu) == CHIP.memory


def test_times_of_a_v5e_by_its_data_sheet(absent, tmp_path, monkeypatch, capsys):
    """It has a quarter of the matrix units of a v6e, at 1.5 GHz, 819 GB/s, and 50 GB/s per link."""
    chip = preflight.HARDWARE["TPU v5 lite"]
    v5e = [SimpleNamespace(device_kind="TPU v5 lite", coords=(x, y, 0)) for x, y in FOUR]
    large = HLO.replace("[8,128]", "[4096,4096]")
    found = preflight.count(large, schedules(tmp_path, attend_3=9, attend_4=3), v5e)
    cycles = 5 * 1.05 * 2 * 4096**3 / 2**17
    assert found["functions_ms"]["mlp"] == pytest.approx(1e3 * cycles / 1.5e9)
    assert chip.peak * chip.clock == pytest.approx(preflight.PEAK_FLOPS["TPU v5 lite"], rel=0.01)
    monkeypatch.setitem(preflight.HARDWARE, DEVICE.device_kind, chip)
    argv = ["v5e-8", "small", "--program", "adam", "--dump", str(tmp_path / "dump")]
    assert preflight.main(argv) == 0
    assert "Some programs on 8 x cpu, rates: data sheet; seconds" in capsys.readouterr().out
    assert json.loads((tmp_path / "dump/preflight.json").read_text())["rates"] == "data sheet"


DEVICE = jax.devices()[0]
ABSENT = preflight.absent_devices
ISSUED = {"attend_3": 10_000, "attend_4": 30}
TIMES = {  # executions in training
    **{"grads0": 3, "grads1": 3, "grads2": 2, "anvil": 8, "adam_tied": 3, "adam": 1},
    **{"tables0-0": 1, "tables0-1": 1, "tables1-1-2-2": 1, "finish": 1, "eval": 0},
}


def compiled_at_once():
    """Return a substitute for a compiled program; like libtpu, write schedules of kernels."""
    folder = re.findall(r"--xla_jf_dump_to=(\S+)", os.environ["LIBTPU_INIT_ARGS"])[-1]
    schedules(Path(folder), **ISSUED)
    memory = SimpleNamespace(peak_memory_in_bytes=3 * GIB)
    return SimpleNamespace(as_text=lambda: HLO, memory_analysis=lambda: memory)


@pytest.fixture
def absent(monkeypatch):
    """Provide 8 devices with the figures of a v6e-8, and a substitute for the compiler."""
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "")
    monkeypatch.setattr(T, "PRESETS", T.PRESETS | {"small": CFG})
    monkeypatch.setattr(preflight, "absent_devices", lambda target: jax.devices())
    monkeypatch.setattr(preflight, "network", lambda devices: (2, 1.0))
    monkeypatch.setattr(T.Program, "lower", lambda *_: SimpleNamespace(compile=compiled_at_once))
    monkeypatch.setitem(preflight.HARDWARE, DEVICE.device_kind, CHIP)


def test_a_run_is_the_sum_of_its_programs(absent, tmp_path, capsys):
    """preflight.json has the fields that other tools read."""
    assert preflight.main(["v6e-8", "small", "--dump", str(tmp_path / "new/dump")]) == 0
    out, err = capsys.readouterr()
    report = json.loads((tmp_path / "new/dump/preflight.json").read_text())
    rows = {row["name"]: row for row in report["variants"]}
    assert {name: row["steps"] for name, row in rows.items()} == TIMES
    assert (report["preset"], report["target"], report["devices"]) == ("small", "v6e-8", 8)
    assert (report["rates"], report["yardstick"]["rows"]) == ("measured", 1.3)
    assert report["config"] == json.loads(json.dumps(asdict(CFG)))
    assert (report["total_steps"], report["total_tokens"]) == (8, 3 * 256 + 5 * 512)
    assert report["command"].startswith("v6e-8 small --dump ") and report["device_kind"] == "cpu"
    (tmp_path / "again").mkdir()
    took = preflight.count(HLO, schedules(tmp_path / "again", **ISSUED), v6e(2, 4))
    for row in rows.values():
        assert {key: row[key] for key in took} == took
        assert row["bytes"] == {"peak": 3 * GIB} and row["resident_bytes"] > 0
        assert (tmp_path / f"new/dump/{row['name']}.hlo").read_text() == HLO
    run, trained = report["predicted"], sum(TIMES.values())
    parts = [run[f"train_{x}seconds"] for x in ("", "link_floor_", "moved_floor_")]
    each = [took[f"{x}_ms"] for x in ("predicted", "link_floor", "moved_floor")]
    assert parts == pytest.approx([trained * ms / 1e3 for ms in each])
    assert run["sum_seconds"] == pytest.approx(sum(parts))
    assert sum(run["components"].values()) == pytest.approx(sum(parts))
    head = "The full run on 8 x cpu, rates: measured\n0.0 s = predicted 0.0 + links 0.0 + moves 0.0"
    assert err == "" and head in out and "everything fits into the 31.25 GiB of a device" in out
    assert "seconds by function: " in out and max(map(len, out.split("\n"))) <= 100


def test_some_programs_have_rows_and_no_sum(absent, monkeypatch, capsys):
    """They fit if the peak, the state and the spare memory are at most the memory, to the byte."""
    argv = ["v6e-8", "small", "--program", "grads1", "adam"]
    assert preflight.main(argv) == 0
    out = capsys.readouterr().out
    table = [line.split()[:2] for line in out.splitlines()]
    assert ["grads1", "3"] in table and ["adam", "1"] in table
    assert "Some programs on 8 x cpu" in out and "full run" not in out
    need = 3 * GIB + T.resident_bytes(*T.make_mesh(CFG), named(CFG, "grads1")) + T.SPARE
    for limit, status in ((need, 0), (need - 1, 1)):
        monkeypatch.setitem(preflight.HARDWARE, DEVICE.device_kind, preflight.Hardware(limit))
        assert preflight.main(argv) == status
    assert "grads1 needs 3.0 GiB per device, but only 3.0 of 5.0 GiB" in capsys.readouterr().out


def test_a_run_that_is_expected_not_to_fit_is_not_compiled(absent, monkeypatch, capsys):
    """With --program it is compiled, and the figures of the compiler decide."""
    few = preflight.Hardware(GIB // 1024)
    monkeypatch.setitem(preflight.HARDWARE, DEVICE.device_kind, few)
    assert preflight.main(["v6e-8", "small"]) == 1
    out = capsys.readouterr().out
    assert "not compiled: " in out and " of 0.0 GiB are usable" in out
    assert "compiling" not in out

    def refuse():
        raise jax.errors.JaxRuntimeError("INTERNAL: Mosaic failed to compile TPU kernel: why")

    assert preflight.main(["v6e-8", "small", "--program", "adam"]) == 1
    monkeypatch.setattr(T.Program, "lower", lambda *_: SimpleNamespace(compile=refuse))
    assert preflight.main(["v6e-8", "small", "--program", "adam"]) == 2
    assert capsys.readouterr().err.endswith("Mosaic failed to compile TPU kernel: why\n")


class Missing(Exception):
    def __repr__(self):
        return "no compiler"


def no_compiler(**options):
    raise Missing


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["v6e-8", "small", "--program", "grads3"], "unknown program grads3: use grads0, grads1"),
        (["v6e-8", "large"], "unknown preset 'large'"),
        (["v6e-8", "small", "--dump", "/dev/null/x"], "/dev/null/x"),
        (["v6e-8", "small", "--set", "devices=16"], "devices=16, but there are 8"),
        ([], "the following arguments are required: TARGET"),
        (["v6e-3"], "unknown hardware v6e-3: use a TPU such as v6e-8, a topology such as v5e:"),
        (["2x4"], "or a GPU such as h100x8 (TPUs: v4, v5e, v5p, v6e; GPUs: a10g, a100-40, "),
        (["v4-1"], "unknown hardware v4-1: use "),
        (["h100x0"], "unknown hardware h100x0: use "),
        (["a100x1"], "unknown hardware a100x1: use "),
        (["v5e-8"], 'cannot compile for v5e-8 (no compiler): install the compiler (pip install "'),
        (["a100-40x1"], "(no compiler): install the compiler (pip install jax-cuda13-plugin=="),
    ],
)
def test_wrong_argument_is_refused_in_one_line(absent, monkeypatch, capsys, argv, words):
    monkeypatch.setattr(T.Program, "lower", lambda *_: pytest.fail("went on to compile"))
    monkeypatch.setattr(preflight.topologies, "get_topology_desc", no_compiler)
    if len(argv) < 3:
        monkeypatch.setattr(preflight, "absent_devices", ABSENT)
    assert preflight.main(argv) == 2
    out, err = capsys.readouterr()
    assert err.startswith("error: ") and err.count("\n") == 1 and words in err


RECORD = T.PRESETS["speedrun"]
libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason='needs libtpu: pip install "jax[tpu]"'
)


# Limits for programs of the record, by the present yardstick (jax 0.10.2, libtpu 0.0.42): predicted
# ms, ms of communication that is not hidden, and GiB at the peak. A missing kernel, a matmul in
# float32 or a table that crosses the network twice would exceed them.
MOST = {"grads0": (22.2, 0.35, 11.8), "anvil": (0.56, 0.01, 8.4)}
MOST |= {"adam": (0.7, 1.6, 8.8), "tables2-2-2-2": (13.4, 0.8, 11.4)}


@libtpu
@pytest.mark.slow
def test_the_record_on_a_v6e_8_keeps_its_limits(tmp_path):
    """This needs another process, because a process can load libtpu only once."""
    tool = [sys.executable, ROOT / "records/preflight.py", "v6e-8", "--dump", tmp_path]
    done = subprocess.run([*tool, "--program", *MOST], capture_output=True, text=True)
    assert done.returncode == 0 and "everything fits into the 31.25 GiB" in done.stdout, done.stderr
    report = json.loads((tmp_path / "preflight.json").read_text())
    assert report["preset"] == "speedrun"
    for row in report["variants"]:
        took = row["predicted_ms"], row["link_floor_ms"], row["bytes"]["peak"] / GIB
        for x, limit in zip(took, MOST[row["name"]], strict=True):
            assert x <= limit and (x > 0.5 * limit or limit < 0.1), (row["name"], took)
    kernels = sum(one.kernel for one in run((tmp_path / "grads0.hlo").read_text()))
    assert kernels >= 2 * len(RECORD.layers_with("attends"))


# Published microseconds on one v6e (records/NOTES.md), by function of TIMED, its arguments, and the
# share that counts: one matmul of 64, or the blocks that a kernel executes.
PUBLISHED = {("chain", n, n, n, 1 / 64): us for n, us in ((1024, 3.751), (2048, 23.71))}
ROWS = (512, 30.71), (1024, 48.2), (2048, 95.69), (4096, 176.9)
PUBLISHED |= {("chain", m, 4096, 4096, 1 / 64): us for m, us in ROWS}
ROWS = (256, 91.75), (512, 117.5), (1024, 186.7), (2048, 331.6), (8192, 1576.0)
PUBLISHED |= {("chain", m, 8192, 8192, 1 / 64): us for m, us in ROWS}
PUBLISHED |= {("chain", 256, 4096, 12288, 1 / 64): 74.49}
PUBLISHED |= {("add", 26, 0, 1): 354.8, ("add", 27, 0, 1): 691.3, ("add", 28, 0, 1): 1389.2}
PUBLISHED |= {("gather", 2**12, 0, 1): 696.7, ("gather", 2**14, 0, 1): 2767.5}
PUBLISHED |= {("flash", 512, b, 1): us for b, us in ((1, 23.5), (8, 208.8), (32, 964.9))}
PUBLISHED |= {("flash", 2048, 1, 10 / 16): 238.3, ("flash", 2048, 8, 10 / 16): 2821.9}
PUBLISHED |= {("flash", 8192, 1, 136 / 256): 4140.6}
PUBLISHED |= {("head", 1): 3960 - 113}  # without its launch
TIMED = """
import json, os, sys, tempfile
from pathlib import Path
sys.path.insert(0, "records")
import preflight
folder = tempfile.mkdtemp()
os.environ["LIBTPU_INIT_ARGS"] = preflight.SCHEDULES.format(folder)
import jax, jax.numpy as jnp
from jax.experimental.pallas.ops.tpu import flash_attention as fa
jax.config.update("jax_platforms", "cpu")
chip = preflight.absent_devices("v6e-1")
def array(*shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=jax.sharding.SingleDeviceSharding(chip[0]))
def chain(x, w):  # 64 matmuls, each needs the full result of the previous one
    def step(x, _):
        sums = jnp.sum(x @ w, axis=1, keepdims=True, dtype=jnp.float32)
        return x + sums.astype(x.dtype), None
    return jax.lax.scan(step, x, None, length=64)[0]
def read(x, y, ids):  # pages of keys and values
    return [jnp.sum(jnp.take(z, ids, axis=1).astype(jnp.float32)) for z in (x, y)]
def attend(q, k, v):
    blocks = fa.BlockSizes(block_q=512, block_k_major=512, block_k=512, block_b=1)
    return fa.flash_attention(q, k, v, causal=True, block_sizes=blocks)
def head(x, w, ids):  # from a GPT's last layer to the loss
    logits = jax.nn.log_softmax(15 * jnp.tanh(x @ w / 15)[:, :-1])
    return -jnp.mean(jnp.take_along_axis(logits, ids[:, 1:, None], axis=-1))
programs = {
    "chain": lambda m, k, n: (chain, array(m, k), array(k, n)),
    "add": lambda bits, _: (jnp.add, *[array(2**bits // 1024, 1024)] * 2),
    "gather": lambda n, _: (read, *[array(8, n, 16, 128)] * 2, array(n, dtype=jnp.int32)),
    "flash": lambda t, b: (attend, *[array(b, 32, t, 128)] * 3),
    "head": lambda: (jax.value_and_grad(head), array(4, 2048, 1024), array(1024, 32768),
                     array(4, 2048, dtype=jnp.int32)),
}
found = []
for name, *sizes, share in json.loads(sys.argv[1]):
    function, *arrays = programs[name](*sizes)
    text = jax.jit(function).lower(*arrays).compile().as_text()
    ms = preflight.count(text, Path(folder), chip)
    found.append(1e3 * share * (ms["predicted_ms"] + ms["moved_floor_ms"]))
print(json.dumps(found))
"""


@libtpu
@pytest.mark.slow
def test_predictions_agree_with_published_times():
    """Each is within 25%, and their geometric mean within 5%."""
    argv = [sys.executable, "-c", TIMED, json.dumps([*PUBLISHED])]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    each = zip(PUBLISHED, PUBLISHED.values(), json.loads(done.stdout), strict=True)
    ratios = {key: measured / predicted for key, measured, predicted in each}
    assert 0.75 < min(ratios.values()) <= max(ratios.values()) < 1.25, ratios
    assert abs(sum(map(math.log, ratios.values()))) < 0.05 * len(ratios), ratios


@cuda_compiler
@pytest.mark.slow
def test_the_record_fits_an_h100():
    """Four layers have all features of the eleven. Each attention layer has three kernels."""
    four = T.validate(replace(RECORD, layers=CFG.layers))
    devices = preflight.absent_devices("h100x8")
    _, mesh = T.make_mesh(four, devices)
    chosen, _ = T.choose_kernels(four, devices[0])
    limit = preflight.HARDWARE[devices[0].device_kind].memory
    for name in ("grads2", "adam", "tables0-0", "eval"):
        program = T.programs(four, mesh, chosen)[named(four, name)].lower().compile()
        peak = program.memory_analysis().peak_memory_in_bytes
        needs = peak + T.resident_bytes(four, mesh, named(four, name))
        assert GIB < needs < limit < 80e9, name
        if name == "grads2":
            kernels = program.as_text().count('"__gpu$xla.gpu.triton"')
            assert kernels == 3 * len(four.layers_with("attends"))
