"""Our recipe against numbers from the original of record 77 (tests/golden/record77/README.md).

Everything is float32 on a CPU, so what differs is the order of sums. Limits are relative to the
largest magnitude of an array, with room over what float32 and float64 runs of the original differ
by: forward 1e-5 (seen there: 9e-7), gradients and Muon 1e-4 (4e-6), Adam 1e-5 (3e-7), losses after
updates 1e-4 (8e-6). The schedule is compared to float32 rounding; rows and hashes are exact.

Where we store things otherwise:
- head is [vocab, width] here, like the embedding;
- the two halves of a rotating pair lie h/2 apart here, and side by side in the original: the rows
  of q and k are permuted (`ROTATED`), which changes no product of q and k;
- the value tables are one table; q, k, v, o and the two MLP matrices lie in banks;
- while tied, our embedding's moments are copies of the head's; the original keeps zeros until then.
"""

import functools
import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import ROOT
from programs import QUICK, lay, quick_compilation, spread

import train_gpt as T

GOLDEN = ROOT / "tests/golden/record77"
META = {name: json.loads((GOLDEN / f"{name}.json").read_text()) for name in ("model", "optimizer")}
SHAPES = META["model"]["parameters"]
CASES = META["model"]["cases"]
SLOW = {"fullwidth", "stage2_block128", "stage2"}  # half a minute and ten seconds each
NAMES = [pytest.param(x, marks=[pytest.mark.slow] * (x in SLOW)) for x in CASES]


@functools.cache
def arrays(name: str) -> dict[str, np.ndarray]:
    """One of the golden files."""
    with np.load(GOLDEN / f"{name}.npz") as file:
        return dict(file)


def config(size: str = "small", block: int = 16, row: int = 384, rows: int = 8) -> T.Config:
    """The record's Config at a golden size; windows in units of `block` tokens."""
    sizes = META["model"]["configs"][size]
    stages = tuple(
        replace(
            stage,
            windows=tuple(w // 128 * block for w in stage.windows),
            row_tokens=row,
            batch_tokens=rows * row,
        )
        for stage in T.Config().stages
    )
    return T.validate(
        replace(
            T.Config(),
            width=sizes["dim"],
            mlp_width=4 * sizes["dim"],
            vocab=sizes["vpad"],
            real_tokens=sizes["vocab"],
            bos=999,
            bigram_rows=sizes["bigram"],
            compute_dtype="float32",
            stages=stages,
            loss_chunk=512,
            micro_tokens=row,
        )
    )


@functools.cache
def originals(size: str = "small") -> dict[str, np.ndarray]:
    """The original's parameters, from their seeds."""
    found = {}
    for row in SHAPES[size]:
        draw = np.random.default_rng(row["seed"]).standard_normal(row["shape"])
        found[row["name"]] = (draw * row["scale"] + row["offset"]).astype(np.float32)
        np.testing.assert_allclose(found[row["name"]].reshape(-1)[:4][: len(row["first"])],
                                   row["first"], rtol=1e-6)  # fmt: skip
    return found


def rotated(width: int, heads: int) -> np.ndarray:
    """For each of our rows of q and k, the original's row."""
    h = width // heads
    pair = np.concatenate([np.arange(0, h, 2), np.arange(1, h, 2)])
    return (np.arange(heads)[:, None] * h + pair).reshape(-1)


def ours(cfg: T.Config, theirs: dict, tied: bool = False, rotate: bool = True) -> dict:
    """The original's parameters (or gradients) in our shapes."""
    d, found = cfg.width, {}
    attn = theirs["attn"].copy()
    if rotate:
        attn[:, :2] = attn[:, :2, rotated(d, cfg.heads)]
    changed = {
        "head": theirs["head"].T,
        "embed": theirs["head"].T if tied else theirs["embed"],
        "value_tables": theirs["value_tables"].reshape(-1, d),
        "attn_bank": attn.reshape(-1, d, d),
        "mlp_bank": np.concatenate([theirs["fc"], theirs["proj"]]),
    }
    for name in T.param_table(cfg):
        found[name] = jnp.asarray(changed[name] if name in changed else theirs[name])
    return found


def back(cfg: T.Config, mine: dict, rotate: bool = True) -> dict[str, np.ndarray]:
    """Our parameters (or gradients, or moments) in the original's shapes."""
    mine = {name: np.asarray(x) for name, x in mine.items()}
    layers, attn = cfg.layers, mine.get("attn_bank")
    if attn is not None:
        attn = attn.reshape(-1, 4, *attn.shape[1:]).copy()
        if rotate:
            attn[:, :2, rotated(cfg.width, cfg.heads)] = attn[:, :2].copy()
        mlp = mine["mlp_bank"]
        mine |= {"attn": attn, "fc": mlp[:layers], "proj": mlp[layers:]}
    if "value_tables" in mine:
        mine["value_tables"] = mine["value_tables"].reshape(-1, cfg.vocab, cfg.width)
        mine["head"] = mine["head"].T
    return mine


def check(what: str, got, want, limit: float, scale: float | None = None):
    """Fails if `got` is further from `want` than `limit` times the largest magnitude."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    assert got.shape == want.shape, what
    scale = scale or np.abs(want).max(initial=1e-30)
    error = np.abs(got - want).max() / scale
    assert error <= limit, f"{what}: off by {error:.2e} of its largest value, limit {limit:.0e}"


def check_stored(golden: dict, key: str, got: np.ndarray, limit: float, at=...):
    """`got` against what is stored under key.norm and key.all, or key.idx and key.val."""
    size = float(np.sqrt(np.mean(np.square(got, dtype=np.float64))))
    norm = np.linalg.norm(got.astype(np.float64))
    assert norm == pytest.approx(float(golden[f"{key}.norm"][at]), rel=limit, abs=1e-12), key
    if f"{key}.all" in golden:
        check(key, got, golden[f"{key}.all"][at], limit)
    elif f"{key}.idx" in golden:
        picked = got.reshape(-1)[golden[f"{key}.idx"]]
        scale = max(np.abs(got).max(), size)
        check(key, picked, golden[f"{key}.val"][at], limit, scale)


# ------------------------------------------------------------------------------------------------
# Forward and gradients
# ------------------------------------------------------------------------------------------------


def case_parts(name: str):
    """(case, config, parameters, tokens [1, t+1], Hyper, windows) of a case of the model file."""
    case = CASES[name]
    block = case["windows"][0] if case["yarn_history"] == [] else None
    changes = len(case["yarn_history"])
    block = block or case["yarn_history"][0][0] // 3
    cfg = config(case["config"], block, case["row_tokens"])
    tokens = np.random.default_rng(case["token_seed"]).integers(0, 999, case["row_tokens"] + 1)
    starts = np.cumsum([0, *case["segment_lengths"]])
    assert starts[-1] == case["row_tokens"]
    tokens[starts[1 if case["mode"] == "eval" else 0 : -1]] = 999
    hyper = T.hyper_at(cfg, cfg.boundaries[changes])
    weights = np.asarray(case["mtp"] or [1.0], np.float32)
    params = ours(cfg, originals(case["config"]), tied=case["tied"])
    hyper = hyper._replace(weights=weights)
    return case, cfg, params, jnp.asarray(tokens[None], jnp.int32), hyper, tuple(case["windows"])


@functools.cache
def outcome(name: str):
    """((features [t, d], weighted sum, plain sum), gradients of it or None) of a case."""
    case, cfg, params, tokens, hyper, windows = case_parts(name)

    def loss(params):
        rows = T.look_up(cfg, params, tokens[:, :-1])
        x_btd = T.forward(params, rows, tokens[:, :-1], cfg, T.PLAIN, windows, hyper)
        targets, weights = T.targets_ahead(tokens, hyper.weights)
        total, plain = T.cross_entropy(x_btd[0], params["head"], targets, weights, cfg)
        return total, (x_btd[0], total, plain)

    # Full width is worth the optimizations: it computes for longer than it compiles.
    options = QUICK if case["config"] == "small" else None
    if case["mode"] == "eval":
        return jax.jit(loss, compiler_options=options)(params)[1], None
    step = jax.jit(jax.value_and_grad(loss, has_aux=True), compiler_options=options)
    (_, found), grads = step(params)
    return found, grads


@pytest.mark.parametrize("name", NAMES)
def test_loss_of_every_token(name):
    golden = arrays("model")
    case, cfg, params, tokens, hyper, _ = case_parts(name)
    np.testing.assert_array_equal(golden[f"{name}/tokens"], tokens[0])
    freqs = golden[f"{name}/yarn_freq"][: cfg.head_width // 2 : 2]
    check("yarn", hyper.freqs, freqs, 1e-6)
    assert float(hyper.attn_scale) == pytest.approx(case["attn_scale"], rel=1e-6)
    ids = T.bigram_ids(tokens[:, :-1], cfg.bigram_rows)
    np.testing.assert_array_equal(ids[0], golden[f"{name}/bigram_ids"])

    (x_td, total, plain), _ = outcome(name)
    sample = golden[f"{name}/sample_rows"]
    check("final", x_td[sample, :16], golden[f"{name}/final.slice"], 1e-5)
    targets, weights = T.targets_ahead(tokens, hyper.weights)
    losses, _, _ = T.token_losses(x_td, params["head"], targets, cfg)
    per_token = np.sum(np.asarray(losses * weights, np.float64), axis=1)
    check("loss_per_token", per_token, golden[f"{name}/loss_per_token"], 1e-5)
    assert float(total) == pytest.approx(case["loss_sum_float64"], rel=1e-6)
    assert float(plain) == pytest.approx(float(np.sum(losses[:, 0])), rel=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_gradient_of_every_parameter(name):
    golden = arrays("model")
    case, cfg, *_ = case_parts(name)
    if case["mode"] == "eval":
        assert not any(key.startswith(f"{name}/grad/") for key in golden)
        return
    grads = back(cfg, outcome(name)[1])
    if case["tied"]:
        grads["head_plus_embed"] = grads["head"] + grads["embed"].T
    names = {key.split("/")[2].rsplit(".", 1)[0] for key in golden if f"{name}/grad/" in key}
    assert names >= {row["name"] for row in SHAPES["small"]}
    for parameter in sorted(names):
        check_stored(golden, f"{name}/grad/{parameter}", grads[parameter], 1e-4)
    norms = np.sqrt(np.sum(np.square(grads["attn"], dtype=np.float64), axis=(2, 3)))
    check("norms of attn", norms, golden[f"{name}/grad/attn.norms"], 1e-4)


# ------------------------------------------------------------------------------------------------
# Optimizer
# ------------------------------------------------------------------------------------------------


def gradients(cfg: T.Config, step: int) -> dict[str, np.ndarray]:
    """The original's gradients at a step of the optimizer scenarios."""
    found = {}
    for k, row in enumerate(SHAPES["small"]):
        rng = np.random.default_rng(11 * 1_000_000 + step * 100 + k)
        grad = rng.standard_normal(row["shape"]) * 1e-3 * (1 + step % 3)
        if row["name"] in ("value_tables", "bigram_table"):
            rows = np.arange(row["shape"][-2])
            grad[..., (rows + step) % 4 != 0, :] = 0
        found[row["name"]] = grad.astype(np.float32)
    return found


@functools.cache
def program(cfg: T.Config, mesh, name: str):
    """A compiled program."""
    with quick_compilation():
        return T.lower(T.programs(cfg, mesh, T.PLAIN)[name], mesh).compile()


def start(cfg: T.Config, mesh, tied: bool, rotate: bool):
    """(state, copies) on the mesh, with the original's parameters and no moments yet."""
    state = T.map_state(cfg, lambda shape, row: np.zeros(shape, np.float32))
    state["params"] = ours(cfg, originals(), tied=tied, rotate=rotate)
    state = {kind: lay(cfg, arrays_, mesh) for kind, arrays_ in state.items()}
    with quick_compilation():
        return state, T.start_copies(cfg, mesh)(state["params"])


def hyper_from(cfg: T.Config, step: int, first: int, mesh):
    """The Hyper of a step of a scenario, which counts Adam's steps from its own first step."""
    done = sum(T.is_adam_step(cfg, s) for s in range(first, step)) + 1
    hyper = T.hyper_at(cfg, step)._replace(adam_count=np.float32(done))
    return jax.tree.map(lambda x: T.put(x, mesh, T.P()), hyper)


def update(cfg: T.Config, step: int, mesh, state, copies, waiting, grads, hyper):
    """(state, copies, waiting gradients) after a step with these gradients."""
    waiting = {name: (*waiting.get(name, ()), grad) for name, grad in grads.items()}
    for name in T.programs_of(cfg, step)[1:]:
        due = {n: waiting.pop(n) for n in T.updated(cfg, name)}
        state, changed, _ = program(cfg, mesh, name)(state, due, hyper)
        copies = copies | changed
    return state, copies, waiting


@pytest.mark.parametrize(
    "scenario",
    ["start", *(pytest.param(name, marks=pytest.mark.slow) for name in ("untie", "end"))],
)
def test_optimizer_steps_of_every_group(scenario):
    golden, cfg = arrays("optimizer"), config()
    facts = META["optimizer"]["scenarios"][scenario]
    mesh = T.make_mesh(cfg)  # all eight: every device updates its share
    (state, copies), waiting = start(cfg, mesh, facts["start_tied"], rotate=False), {}
    first = facts["steps"][0]["step"]
    for at, fact in enumerate(facts["steps"]):
        step = first + at
        assert fact["adam"] == T.is_adam_step(cfg, step)
        assert fact["tied_during_update"] == T.is_tied(cfg, step)
        grads = spread(cfg, ours(cfg, gradients(cfg, step), rotate=False), mesh)
        hyper = hyper_from(cfg, step, first, mesh)
        state, copies, waiting = update(cfg, step, mesh, state, copies, waiting, grads, hyper)
        mine = {
            kind: back(cfg, T.unpadded(cfg, arrays_), rotate=False)
            for kind, arrays_ in state.items()
        }
        for name in originals():
            muon = f"{scenario}/{name}/momentum.norm" in golden
            kinds = {"params": "w", "first": "momentum" if muon else "m"}
            kinds["second"] = "second" if muon else "v"
            for kind, short in kinds.items():
                got = mine[kind][name]
                if name == "embed" and kind != "params" and fact["tied_after"]:
                    got = np.zeros_like(got)  # ours are copies of the head's, theirs still zero
                check_stored(golden, f"{scenario}/{name}/{short}", got, 1e-4 if muon else 1e-5, at)
        for name, copy in copies.items():
            np.testing.assert_array_equal(copy, state["params"][name])


# ------------------------------------------------------------------------------------------------
# Everything together
# ------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("scenario", ["start", "untie"])
def test_training_steps(scenario):
    """Two rows a step through our own programs, over a stage, a YaRN change and the untying."""
    golden, facts = arrays("train"), json.loads((GOLDEN / "train.json").read_text())["scenarios"]
    steps, cfg = facts[scenario]["steps"], config(row=320, rows=2)
    first, mesh = steps[0]["step"], T.make_mesh(replace(cfg, devices=1))
    (state, copies), waiting = start(cfg, mesh, tied=True, rotate=True), {}
    for at, fact in enumerate(steps):
        step = first + at
        rows = np.zeros((2, 321), np.uint16)
        for r, lengths in enumerate(facts[scenario]["row_segments"]):
            rng = np.random.default_rng(11 * 1000 + 1_000_000 + 2 * step + r)
            rows[r] = rng.integers(0, 999, 321)
            rows[r, np.cumsum([0, *lengths[:-1]])] = 999
        stage = T.stage_at(cfg, step)
        assert stage.windows == tuple(fact["windows"])
        hyper = hyper_from(cfg, step, first, mesh)
        assert hyper.weights[: len(fact["mtp"])] == pytest.approx(fact["mtp"], rel=1e-6)
        limit = 1e-6 if at == 0 else 1e-4
        for r, want in enumerate(golden[f"{scenario}/row_loss_sums"][at]):
            got = row_loss(cfg, stage, copies, jnp.asarray(rows[r : r + 1], jnp.int32), hyper)
            assert float(got) == pytest.approx(float(want), rel=limit)
        tokens = T.put(rows, mesh, T.P("data"))
        grads, _ = program(cfg, mesh, T.programs_of(cfg, step)[0])(copies, tokens, hyper)
        state, copies, waiting = update(cfg, step, mesh, state, copies, waiting, grads, hyper)
        for name, got in back(cfg, state["params"]).items():
            if f"{scenario}/{name}/w.norm" in golden:
                want = float(golden[f"{scenario}/{name}/w.norm"][at])
                norm = np.linalg.norm(got.astype(np.float64))
                assert norm == pytest.approx(want, rel=1e-4), (name, step)


@functools.partial(jax.jit, static_argnums=(0, 1), compiler_options=QUICK)
def row_loss(cfg, stage, params, row, hyper):
    """The weighted loss of one row, summed."""
    weights = hyper.weights[: len(stage.weights)]
    rows = T.look_up(cfg, params, row[:, :-1])
    return T.loss_sums(params, rows, row, cfg, T.PLAIN, stage.windows, hyper, weights)[0]


def test_schedule_of_every_step():
    """All 1,490 steps; equal to float32 rounding (the original computes in Python floats too)."""
    golden, cfg = arrays("schedule"), T.Config()
    assert cfg.total_tokens == 395_837_440
    assert golden["untie_step"] == max(s for s in range(cfg.steps) if T.is_tied(cfg, s))
    for i, (first, end) in enumerate(golden["boundaries"].tolist()):
        assert (first, end) == cfg.boundaries[i : i + 2]
        freqs = golden["yarn_freq"][i][: cfg.head_width // 2 : 2]
        np.testing.assert_allclose(T.yarn(cfg, i)[0], freqs, rtol=1e-6)
    short, long, scale = golden["final_eval"].tolist()
    assert (short, long) == cfg.val_windows
    assert T.yarn(cfg, 3)[1] == pytest.approx(scale, rel=1e-6)
    for step in range(cfg.steps):
        stage, hyper = T.stage_at(cfg, step), T.hyper_at(cfg, step)
        exact = {
            "stage": T.stage_index(cfg, step),
            "batch_tokens": stage.batch_tokens,
            "window_short": stage.windows[0],
            "window_long": stage.windows[1],
            "doc_cap": stage.doc_cap,
            "adam_steps": T.is_adam_step(cfg, step),
            "tied_during_update": T.is_tied(cfg, step),
            "mtp_count": len(stage.weights),
        }
        for name, value in exact.items():
            assert golden[name][step] == value, (name, step)
        rounded = {
            "lr_factor": hyper.lr,
            "muon_momentum": hyper.momentum,
            "attn_scale": hyper.attn_scale,
            "mtp_weights": hyper.weights,
        }
        for name, value in rounded.items():
            np.testing.assert_allclose(value, golden[name][step], rtol=3e-7, atol=1e-7)
