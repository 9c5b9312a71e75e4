"""The recipe against numbers of upstream, record 92 (tests/golden/record92/README.md).

Everything except whole steps is float32 on a CPU, so only the order of sums differs. Limits are
relative to the largest magnitude of an array. They are larger than the differences between float32
and float64 runs of upstream (in parentheses): forward pass 1e-5 (2e-6; at full width 2e-5, 4e-6),
queries and keys 2e-4 (angles: 4e-5), gradients 1e-4 (8e-6; single numbers 1e-3, 7e-5), updates and
averages 1e-5 (1e-6; the equaliser 1e-4, 2e-6), schedule: float32 rounding.

Differences in storage:
- Here, the head is [vocab, width], like the embedding. The value tables are one table. Matrices of
  q and k, of v and o, and of MLPs are in banks.
- The two halves of a rotating pair are half a head apart here, and adjacent upstream. The rows of q
  and k are permuted (`query_rows`), which does not change their products.
- Bigrams and trigrams have separate halves of the n-gram table upstream, and alternate here.
- Upstream has two more matrices, for layer 7, which has no MLP. Tests of updates and averages add
  an MLP to it to compare all moments. Its weights never change, so they are reset.
- The last mix has its sources, and so the lanes of its weights, in another order (`LANES`).
- While tied, the moments of our embedding are copies of the head's. Upstream has none until then.
"""

import functools
import hashlib
import importlib
import json
from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import ROOT
from programs import (
    QUICK,
    by_name,
    lay,
    mesh_of,
    padded,
    quick_compilation,
    stage_at,
    strip_padding,
    tables_apart,
    tables_joined,
    updates_at,
    val_batch,
)

import train_gpt as T

GOLDEN = ROOT / "tests/golden/record92"
RECORD = replace(T.Config(), ngram_ids="raw")


@functools.cache
def arrays(name: str) -> dict[str, np.ndarray]:
    """Return the arrays of a golden file."""
    with np.load(GOLDEN / f"{name}.npz") as file:
        return dict(file)


@functools.cache
def facts(name: str) -> dict:
    """Return the settings of a golden file."""
    return json.loads((GOLDEN / f"{name}.json").read_text())


SIZES, SHAPES = facts("model")["configs"], facts("model")["parameters"]
SEED, CASES = facts("model")["seed"], facts("model")["cases"]


def config(size: str, block: int = 16, row: int = 192, rows: int = 8) -> T.Config:
    """Return the record's Config at a golden size, with windows in units of `block` tokens."""
    sizes = SIZES[size]
    stages = tuple(
        replace(
            stage,
            windows=tuple(w // 128 * block for w in stage.windows),
            row_tokens=row,
            batch_tokens=rows * row,
            candidates=tuple(min(n, 512 + 64 * i) for i, n in enumerate(stage.candidates)),
        )
        for stage in RECORD.stages
    )
    return replace(
        RECORD,
        **{"width": sizes["dim"], "mlp_width": sizes["mlp"], "ngram_rows": sizes["table"]},
        **{"vocab": sizes["vpad"], "real_tokens": sizes["vocab"], "bos": sizes["vocab"] - 1},
        **{"compute_dtype": "float32", "stages": stages, "loss_chunk": 128, "micro_tokens": row},
        **{"val_row": row, "val_batch": rows * row, "val_tokens": rows * row},
    )


DEAD = 7  # the layer without an MLP, for which upstream has unused matrices


def slots(cfg: T.Config) -> list[int]:
    """Return the number of each of our MLPs upstream. Layer 8 has the ninth and the last."""
    return [i for i in (*range(9), 11, 9, 10) if i != DEAD or cfg.layers[DEAD].mlps]


def with_dead(cfg: T.Config) -> T.Config:
    """Return the config with an MLP in the layer without one (see the docstring above)."""
    layers = (replace(x, mlps=1) if i == DEAD else x for i, x in enumerate(cfg.layers))
    return replace(cfg, layers=tuple(layers))


LANES = np.array(
    [0, 1, 2, 4, 3, 5, 7, 6, 8, 9, 10, 11, 12, 13]
)  # our sources in the order of upstream


def draw(seed: int, shape) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape)


@functools.cache
def originals(size: str) -> dict[str, np.ndarray]:
    """Return the parameters of upstream, drawn from their seeds."""
    found = {}
    for row in SHAPES[size]:
        x = draw(row["seed"], row["shape"]) * row["scale"] + row["offset"]
        found[row["name"]] = x.astype(np.float32)
        np.testing.assert_allclose(x.reshape(-1)[:4], row["first"][: x.size], rtol=1e-6)
        assert np.linalg.norm(x) == pytest.approx(row["norm"], rel=1e-6)
    return found


def tied(theirs: dict) -> dict:
    """Return the parameters with the head as embedding."""
    return theirs | {"embed": theirs["head"].T}


@functools.cache
def query_rows(cfg: T.Config) -> np.ndarray:
    """Return the row of upstream for each row of q or k, [attentions, d]."""
    h, quarter, found = cfg.head_width, np.arange(cfg.head_width // 4), []
    for i in cfg.layers_with("attends"):
        if (
            cfg.layers[i].attends == "long"
        ):  # the halves of pairs, each with dimensions that do not rotate
            head = 2 * quarter, h // 2 + quarter, 2 * quarter + 1, 3 * h // 4 + quarter
        else:
            head = 2 * quarter, 2 * quarter + 1, np.arange(h // 2, h)
        found.append((h * np.arange(cfg.heads)[:, None] + np.concatenate(head)).reshape(-1))
    return np.stack(found)


def ours(cfg: T.Config, theirs: dict) -> dict[str, np.ndarray]:
    """Return parameters (or gradients) of upstream in our shapes."""
    d, rows = cfg.width, query_rows(cfg)[:, None, :, None]
    qk = np.take_along_axis(theirs["attn"][:, :2], rows, axis=2)
    table = np.empty_like(theirs["ngram_table"])
    table[T.spread(np.arange(cfg.ngram_rows), cfg.ngram_rows)] = theirs["ngram_table"]
    changed = {
        "head": theirs["head"].T,
        "value_tables": theirs["value_tables"].reshape(-1, d),
        "ngram_table": table,
        "qk_bank": qk.reshape(-1, 2 * cfg.head_width, d),
        "vo_bank": theirs["attn"][:, 2:].reshape(-1, d, d),
        "mlp_bank": np.stack([theirs[x][slots(cfg)] for x in ("fc", "proj")], axis=1).reshape(
            -1, *theirs["fc"].shape[1:]
        ),
        "mudd_w2g": theirs["mudd_w2g"][LANES],
    }
    for name in ("mudd_w2", "mudd_b2"):
        changed[name] = np.stack([theirs[name][0], theirs[name][1][LANES]])
    return {name: changed.get(name, theirs.get(name)) for name in T.param_specs(cfg)}


def back(cfg: T.Config, mine: dict) -> dict[str, np.ndarray]:
    """Return our parameters (or gradients, moments, averages) in the shapes of upstream."""
    mine = {name: np.asarray(x) for name, x in mine.items()}
    found = {name: x for name, x in mine.items() if not name.endswith("_bank")}
    d, attentions = cfg.width, len(query_rows(cfg))
    if "head" in mine:
        found["head"] = mine["head"].T
    if "value_tables" in mine:
        found["value_tables"] = mine["value_tables"].reshape(-1, cfg.vocab, d)
    if "ngram_table" in mine:
        places = T.spread(np.arange(cfg.ngram_rows), cfg.ngram_rows)
        found["ngram_table"] = mine["ngram_table"][places]
    for name in {"mudd_w2", "mudd_b2"} & set(mine):
        found[name] = np.stack([mine[name][0], mine[name][1][np.argsort(LANES)]])
    if "mudd_w2g" in mine:
        found["mudd_w2g"] = mine["mudd_w2g"][np.argsort(LANES)]
    if "vo_bank" in mine:
        found["attn"] = mine["vo_bank"].reshape(attentions, 2, d, d)
    if "qk_bank" in mine:
        rows = np.argsort(query_rows(cfg))[:, None, :, None]
        qk = np.take_along_axis(mine["qk_bank"].reshape(attentions, 2, d, d), rows, axis=2)
        found["attn"] = np.concatenate([qk, found["attn"]], axis=1)
    if "mlp_bank" in mine:
        for at, name in enumerate(("fc", "proj")):
            matrices = mine["mlp_bank"][at::2]
            found[name] = np.zeros((12, *matrices.shape[1:]), matrices.dtype)
            found[name][slots(cfg)] = matrices
    return found


def check(what: str, got, want, limit: float):
    """Fail if `got` differs from `want` by more than `limit` times the largest magnitude."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    assert got.shape == want.shape, what
    error = np.abs(got - want).max() / max(np.abs(want).max(initial=0), 1e-30)
    assert error <= limit, f"{what}: off by {error:.2e} of its largest value, limit {limit:.0e}"


def check_stored(golden: dict, key: str, got, limit: float, at=...):
    """Compare `got` with the numbers stored as key.norm and key.all, or key.idx and key.val."""
    got = np.asarray(got, np.float64)
    norm = float(golden[f"{key}.norm"][at])
    assert np.linalg.norm(got) == pytest.approx(norm, rel=limit, abs=1e-12), key
    if f"{key}.all" in golden:
        check(key, got, golden[f"{key}.all"][at], limit)
    elif f"{key}.idx" in golden:
        picked = got.reshape(-1)[golden[f"{key}.idx"]]
        check(key, picked, golden[f"{key}.val"][at], limit)


@functools.cache
def case_parts(name: str) -> SimpleNamespace:
    """Return a case of the model file: facts, golden arrays, config, parameters and inputs."""
    c = SimpleNamespace(**CASES[name])
    own = (key for key in arrays("model") if key.startswith(f"{name}/"))
    c.golden = {key.removeprefix(f"{name}/"): arrays("model")[key] for key in own}
    c.tokens = np.random.default_rng(c.token_seed).integers(0, 999, c.row_tokens + 1)
    starts = np.cumsum([0, *c.segment_lengths])
    assert starts[-1] == c.row_tokens
    c.tokens[starts[1 if c.mode == "eval" else 0 : -1]] = 999
    c.cfg = config(c.config, 128 if c.config == "full" else 16, c.row_tokens)
    if c.mode == "eval":
        c.cfg = replace(c.cfg, val_windows=tuple(c.windows))
    else:
        assert c.cfg.stages[c.stage].windows == tuple(c.windows)
    c.hyper = T.hyper_at(c.cfg, c.cfg.boundaries[c.stage])
    prefix_v = arrays("model")["prefix_table"]
    walk = c.walk_before if c.candidates else 0
    c.targets, c.walk = T.row_targets(c.tokens, walk, c.candidates, prefix_v)
    about = facts("model")["signs"]
    signs = np.sign(draw(about["seed"], (about["rows"], c.cfg.width))).astype(np.int8)
    assert signs[0, :16].tolist() == about["first_row_small"] or c.config == "full"
    c.signs = jnp.asarray(signs)
    return c


def parameters(c: SimpleNamespace) -> dict[str, np.ndarray]:
    """Return the parameters of upstream in a case."""
    return tied(originals(c.config)) if c.tied else originals(c.config)


def watch(patch, seen: dict) -> T.Kernels:
    """Patch T so that `seen` gets the intermediate results that the golden file has."""

    def note(function: str, write):
        real = getattr(T, function)

        def noting(*args, **options):
            out = real(*args, **options)
            write(args, out)
            return out

        patch.setattr(T, function, noting)

    def keep(key, x):
        seen.setdefault(key, []).append(x)

    def gates_are(args, out):
        if args[1] == "gate":
            keep("gates_of", args[3])
            keep("gates", jnp.concatenate(list(out.values()), axis=-1))

    note("signed_sum", lambda args, out: keep("big", out))
    note("smear", lambda args, out: keep("smeared", out))
    note("coefficients", gates_are)
    note("mlp", lambda args, out: keep("mid", args[2]))
    note("attention", lambda args, out: keep("attn_branch", out))
    note("mudd_layer", lambda args, out: keep("cache9", args[1]))
    note("mudd_values", lambda args, out: keep("cache7", args[2]["source"]))
    note("mudd_mix", lambda args, out: (keep("last", args[1]), keep("mixed", out)))

    def attending(q, k, v, *rest):
        out = T.attend_band(q, k, v, *rest)
        keep("products", (q, k, v, out))
        return out

    def telling(x, head, targets, weights, cfg):
        losses = T.chunk_losses(x, head, targets, cfg)
        keep("final", x)
        keep("loss_per_token", jnp.sum(losses * weights, axis=1))
        return T.cross_entropy(x, head, targets, weights, cfg)

    attend = functools.partial(T.attend_heads, attending)
    return T.PLAIN._replace(attend=attend, cross_entropy=telling)


@functools.cache
def outcome(name: str):
    """Return (weighted sum of losses, intermediate results, gradients or None) of a case."""
    c = case_parts(name)
    cfg, hyper = c.cfg, c.hyper
    inputs, all_targets = (
        jnp.asarray(c.tokens[None, :-1]),
        T.Targets(*(jnp.asarray(x)[None] for x in c.targets)),
    )
    places = T.spread(T.ngram_hashes(inputs, cfg.ngram_rows), cfg.ngram_rows)
    validates = c.mode == "eval"
    tokens = c.tokens[None].astype(np.int32)
    rows = T.Rows(jnp.asarray(tokens), inputs, places.swapaxes(0, 1), all_targets)
    stage = None
    if not validates:  # a batch of one row
        own = {"loss_weights": tuple(c.mtp), "prefix_weights": (c.prefix_weight or 0.0,)}
        stage = replace(cfg.stages[c.stage], batch_tokens=c.row_tokens, row_tokens=c.row_tokens)
        stage = replace(stage, **own)
        prefix = np.float32(own["prefix_weights"][0])
        hyper = hyper._replace(loss_weights=np.float32(c.mtp), prefix_weight=prefix)

    def loss(params):
        seen = {}
        with pytest.MonkeyPatch.context() as patch:
            kernels = watch(patch, seen)
            model = T.Model({}, cfg, kernels, stage, hyper, c.signs)
            found = T.look_up(tables_apart(cfg, params), T.table_ids(cfg, rows))
            weighted, plain = T.batch_loss(params, found, model, rows)
            return plain if validates else weighted, seen

    # At full width, running takes longer than compiling, so the compiler optimizes.
    jit = functools.partial(jax.jit, compiler_options=None if c.config == "full" else QUICK)
    params = {name: jnp.asarray(x) for name, x in ours(cfg, parameters(c)).items()}
    if validates:
        return *jit(loss)(params), None
    (total, seen), grads = jit(jax.value_and_grad(loss, has_aux=True))(params)
    return total, seen, grads


LIMITS = {"fullwidth": 2e-5}
SLOW = set(CASES) - {"stage0"}  # a few seconds each; 20 s at full width
NAMES = [pytest.param(x, marks=[pytest.mark.slow] * (x in SLOW)) for x in CASES]


@pytest.mark.parametrize("name", CASES)
def test_inputs(name):
    """Tokens, documents, hashes, rotation, candidates. Only the rotation is not exact."""
    c = case_parts(name)
    golden, inputs = c.golden, c.tokens[None, :-1]
    np.testing.assert_array_equal(golden["tokens"], c.tokens)
    cap = 0 if c.mode == "eval" else c.cfg.attention_cap
    jit = functools.partial(jax.jit, compiler_options=QUICK)  # faster than single operations
    segments = np.asarray(jit(T.segment_ids, static_argnums=(1, 2))(inputs, c.cfg.bos, cap))[0]
    starts = np.flatnonzero(np.diff(segments, prepend=-1))
    np.testing.assert_array_equal(starts, np.unique(golden["cu_seqlens"])[:-1])
    ids = T.ngram_hashes(inputs, c.cfg.ngram_rows)
    np.testing.assert_array_equal(ids[:, 0], golden["ngram_ids"])
    signs = np.asarray(jit(T.sign_ids, static_argnums=1)(inputs, c.cfg.sign_rows))
    np.testing.assert_array_equal(signs[:, 0], golden["sign_rows"])
    for freqs, key in zip(c.hyper.freqs, ("yarn_narrow", "yarn_wide"), strict=True):
        want = golden[key]  # for all dimensions, also those without rotation
        check(key, np.pad(np.repeat(freqs, 2), (0, len(want) - 2 * len(freqs))), want, 3e-7)
    np.testing.assert_allclose(c.hyper.scales, c.attn_scale, rtol=3e-7)
    if c.candidates:
        assert (c.rank * c.cfg.vocab // 8, c.walk) == (c.walk_before, c.walk_after)
        for got, key in zip(c.targets, ("candidates", "target_pos", "prefix_pos"), strict=False):
            np.testing.assert_array_equal(got, golden[key])


@pytest.mark.parametrize("name", NAMES)
def test_activations(name):
    """The residual stream and the gates of each layer, inputs and outputs of each attention."""
    c, (_, seen, _), limit = case_parts(name), outcome(name), LIMITS.get(name, 1e-5)
    golden, rows, cfg = c.golden, c.golden["sample_rows"], c.cfg
    seen, products = dict(seen), seen["products"]
    del seen["products"]
    seen = {key: [np.asarray(x).reshape(c.row_tokens, -1) for x in seen[key]] for key in seen}
    seen["x0"], seen["layer4_in"] = ([x] for x in seen["gates_of"])
    for key in ("smeared", "x0", "big", "layer4_in", "cache7", "cache9", "last", "mixed", "final"):
        (x,) = seen[key]
        check_stored(golden, key, x, limit)
        check(key, x[rows, :16], golden[f"{key}.slice"], limit)
    rms = np.sqrt(np.mean(np.square(seen["final"][0]), axis=1))
    check("final.rms", rms, golden["final.rms"], limit)
    for key in ("mid", "attn_branch"):
        for i, x in enumerate(seen[key]):
            check_stored(golden, key, x, limit, i)
        found = np.stack(seen[key])[:, rows, :16]
        check(key, found, golden[f"{key}.slice"], limit)
    for lanes, key in zip(seen["gates"], ("pre_gate", "post_gate"), strict=True):
        check(key, lanes[rows], golden[key], limit)
    for at, qkvo in enumerate(products):
        for kind, x in zip("qkvo", qkvo, strict=True):
            x = np.asarray(x)[0]
            if kind in "qk":
                first = query_rows(cfg)[at][: x.shape[-1]]
                x = x[..., np.argsort(first)]
            picked = x.reshape(-1)[golden["attn_idx"] % x.size]
            check(f"attn_{kind}", picked, golden[f"attn_{kind}.val"][at], 2e-4)
            norm = float(golden[f"attn_{kind}.norm"][at])
            assert np.linalg.norm(x) == pytest.approx(norm, rel=2e-4)


@pytest.mark.parametrize("name", NAMES)
def test_loss_of_every_token(name):
    c, (total, seen, _), limit = case_parts(name), outcome(name), LIMITS.get(name, 1e-5)
    golden = c.golden
    check("loss_per_token", seen["loss_per_token"][0], golden["loss_per_token"], limit)
    assert float(total) == pytest.approx(c.loss_sum_float64, rel=1e-6)
    head = parameters(c)["head"]
    head = head[:, c.targets.candidates] if c.candidates else head
    capped = np.asarray(T.cap_logits(seen["final"][0].reshape(c.row_tokens, -1) @ head, c.cfg))
    if c.mode == "train":
        check("lse", np.log(np.sum(np.exp(capped), axis=1)), golden["lse"], limit)
        check("logits", capped[golden["sample_rows"], :256], golden["logits"], limit)


@pytest.mark.parametrize("name", [x for x in NAMES if "eval" not in str(x)])
def test_gradient_of_every_parameter(name):
    c = case_parts(name)
    grads = back(c.cfg, outcome(name)[2])
    if c.tied:
        grads["head_plus_embed"] = grads["head"] + grads["embed"].T
    names = {key.split("/")[1].rsplit(".", 1)[0] for key in c.golden if key.startswith("grad/")}
    assert names == set(grads)
    for parameter, x in grads.items():
        limit = 1e-3 if x.size == 1 else 1e-4
        check_stored(c.golden, f"grad/{parameter}", x, limit)
        norms = c.golden.get(f"grad/{parameter}.norms")
        if norms is not None:  # of each matrix
            each = np.square(x.reshape(*norms.shape, -1), dtype=np.float64)
            check(f"norms of {parameter}", np.sqrt(np.sum(each, axis=-1)), norms, limit)


def spread(cfg: T.Config, step: int, grads: dict, mesh) -> dict:
    """Return gradients of a step in the layout of a `grads` program: a part of the sum on each
    device. Two devices have half of the gradient of each row of the n-gram table. Rows of value
    tables are looked up once."""
    n, found = mesh.size, {}
    stage = stage_at(cfg, step)
    for name, x in grads.items():
        row = T.param_specs(cfg)[name]
        shape = padded(x.shape, row, n)
        if row.optimizer == "anvil":
            found[name] = lay(cfg, {name: x}, mesh)[name]
            continue
        if row.optimizer == "rows":
            share, size = shape[0] // n, T.capacity(stage.batch_tokens, n)
            requests = np.full((n, n, size), share, np.int32)
            parts = np.zeros((n, n, size, x.shape[1]), x.dtype)
            read = np.flatnonzero(np.any(x, axis=1))
            for owner, device in np.ndindex(n, n):
                own = read[(read // share == owner) & ((read - device) % n < 2)]
                requests[owner, device, : len(own)] = own % share
                parts[owner, device, : len(own)] = x[own] / min(n, 2)
            arrays = requests.reshape(n * n, size), parts.reshape(n * n, size, -1)
        else:
            parts = np.zeros((n, *shape), x.dtype)
            for i in range(n):
                parts[i, i : len(x) : n] = x[i::n]
            arrays = parts.reshape(-1, *shape[1:])
        found[name] = jax.tree.map(lambda part: T.put(part, mesh, T.P(T.AXIS)), arrays)
    return found


@functools.cache
def program(cfg: T.Config, devices: int, name: str):
    """Return a compiled program. Programs of gradients return the weighted loss."""

    def telling(*args):
        return (T.cross_entropy(*args)[0],) * 2

    mesh, kernels = mesh_of(devices), T.PLAIN._replace(cross_entropy=telling)
    with quick_compilation():
        return by_name(T.programs(cfg, mesh, kernels))[name].lower().compile()


class Training:
    """A run that starts with the parameters of upstream, step by step."""

    def __init__(self, cfg: T.Config, devices: int, start: dict, signs=None):
        self.cfg, self.devices, self.mesh = cfg, devices, mesh_of(devices)
        state = T.map_state(cfg, lambda shape, dtype, row: np.zeros(shape, dtype))
        for name, x in ours(cfg, start).items():
            state["params"][name] = x.astype(state["params"][name].dtype)
        self.state = {kind: lay(cfg, x, self.mesh) for kind, x in state.items()}
        with quick_compilation():
            self.copies = T.start_copies(cfg, self.mesh)(self.state["params"], np.uint32(0))
        if signs is not None:
            self.copies["signs"] = T.put(signs, self.mesh, T.P())
        self.waiting, self.adams, self.table_updates = {}, 0, 0

    def hyper(self, step: int):
        """Return the Hyper of a step. Golden scenarios count updates from their first one."""
        hyper = T.hyper_at(self.cfg, step)
        adams, updates = np.array([self.adams + 1, self.table_updates + 1], hyper.lr.dtype)
        hyper = hyper._replace(adam_count=adams, table_count=updates)
        return jax.tree.map(lambda x: T.put(x, self.mesh, T.P()), hyper)

    def gradients(self, step: int, rows, wanted):
        """Return (gradients on the devices, sum of the weighted losses of the rows)."""
        key, table = T.schedule(self.cfg).programs[step][0], self.state["params"]["ngram_table"]
        put = functools.partial(T.put, mesh=self.mesh, spec=T.P(T.AXIS))
        rows, wanted = jax.tree.map(put, (rows, wanted))
        args = self.copies, table, T.Batch(rows, wanted, self.hyper(step))
        grads, loss, dropped = program(self.cfg, self.devices, str(key))(*args)
        assert dropped == 0
        stage = stage_at(self.cfg, step)  # losses are means over its rows
        return grads, float(loss) * stage.batch_tokens * stage.rows

    def update(self, step: int, grads: dict):
        """Run all updates of a step with these gradients."""
        hyper = self.hyper(step)
        self.waiting = {n: (*self.waiting.get(n, ()), grad) for n, grad in grads.items()}
        for update in T.schedule(self.cfg).programs[step][1:]:
            due = {n: self.waiting.pop(n) for n in T.updated(self.cfg, update.kind)}
            missing = update.steps - len(next(iter(due.values())))
            for n, found in due.items():  # zeros for steps before the scenario
                due[n] = (jax.tree.map(jnp.zeros_like, found[0]),) * missing + found
            step_of = program(self.cfg, self.devices, str(update))
            self.state, changed, _ = step_of(self.state, due, hyper)
            self.copies |= changed
        self.adams += updates_at(self.cfg, "adam")[step] is not None
        self.table_updates += updates_at(self.cfg, "tables")[step] is not None


def gradient(size: str, step: int) -> dict[str, np.ndarray]:
    """Return the gradients of upstream at a step of the optimizer scenarios."""
    found = {}
    for k, row in enumerate(SHAPES[size]):
        grad = draw(SEED * 1_000_000 + step * 100 + k, row["shape"]) * 1e-3 * (1 + step % 3)
        if row["name"] in ("value_tables", "ngram_table"):
            grad[..., (np.arange(row["shape"][-2]) + step) % 4 != 0, :] = 0
        found[row["name"]] = grad.astype(np.float32)
    return found


def equalisers(cfg: T.Config, mine: dict) -> dict[str, np.ndarray]:
    """Return the running mean squares of ANVIL in the shapes of upstream."""
    qk, vo, mlp = (np.asarray(mine[name]) for name in ("qk_bank", "vo_bank", "mlp_bank"))
    layers = len(cfg.layers_with("attends"))
    own = np.argsort(slots(cfg))
    found = {name: mlp[at::2][own] for at, name in enumerate(("fc", "proj"))}
    found["attn_qk"] = qk.reshape(layers, 2, cfg.heads // 2, -1)
    return found | {"attn_vo": vo.reshape(layers, 2, -1)}


SCENARIOS = facts("optimizer")["scenarios"]


@pytest.mark.parametrize(
    "scenario, devices",
    [
        ("start", 8),
        *(pytest.param(x, 8, marks=pytest.mark.slow) for x in SCENARIOS if x != "start"),
        *(pytest.param("cadence", n, marks=pytest.mark.slow) for n in (1, 2)),
    ],
)
def test_updates_of_every_group(scenario, devices):
    """Each device has a part of given gradients, and updates its shards."""
    golden, cfg = arrays("optimizer"), with_dead(config("tiny"))
    about, start = SCENARIOS[scenario], originals("tiny")
    run = Training(cfg, devices, tied(start) if about["start_tied"] else start)
    compared = set()
    for at, fact in enumerate(about["steps"]):
        step = fact["step"]
        due, event = updates_at(cfg, "adam")[step], updates_at(cfg, "tables")[step]
        assert (fact["adam"], fact["event"]) == (due is not None, event is not None)
        assert due is None or due.tied == fact["tied_during_update"]
        run.update(step, spread(cfg, step, ours(cfg, gradient("tiny", step)), run.mesh))
        kinds = {"params": "w", "first": "m", "second": "v", "fast": "fast", "slow": "slow"}
        state = {kind: strip_padding(cfg, x) for kind, x in run.state.items()}
        for kind, short in kinds.items():
            for name, x in back(cfg, state[kind]).items():
                if name == "embed" and kind != "params" and fact["tied_after"]:
                    x = np.zeros_like(
                        x
                    )  # ours are copies of the head's moments; upstream has zeros
                if name in ("fc", "proj") and kind == "params":
                    x[DEAD] = start[name][DEAD]
                check_stored(golden, f"{scenario}/{name}/{short}", x, 1e-5, at)
                compared.add(f"{scenario}/{name}/{short}")
        for name, x in equalisers(cfg, state["equaliser"]).items():
            check_stored(golden, f"{scenario}/{name}/second", x, 1e-4, at)
            compared.add(f"{scenario}/{name}/second")
        copies = tables_joined(run.copies)
        for name in set(copies) - {"signs"}:
            np.testing.assert_array_equal(copies[name], run.state["params"][name])
    stored = {key.rsplit(".", 1)[0] for key in golden if key.startswith(f"{scenario}/")}
    assert compared == {key for key in stored if not key.endswith("/step")}


TAGS = {"ema": "tail-ema", "average": "tail-avg"}
TAGS |= {"value_average": "value-embed-avg", "bank_ema": "bank-blend"}
AVERAGED = "head", "embed", "value_tables", "attn", "fc", "proj"


def test_steps_of_the_averages():
    golden, ours = arrays("tail"), T.schedule(RECORD).hyper.average_rates
    for tail, tag in TAGS.items():
        steps, rates = (golden[f"ticks/{tag}/{x}"].tolist() for x in ("step", "rate"))
        if tail == "ema":  # upstream begins at step 896 with the weights after step 895
            assert steps[0] == 896
            steps[0] = 895
        column = ours[:, [*T.AVERAGES].index(tail)]
        assert np.flatnonzero(column).tolist() == steps
        first, *others = column[steps]
        assert first == 1.0
        np.testing.assert_allclose(others, rates[1:], rtol=1e-12)


def test_averages_of_the_last_weights():
    """On weights by a formula for each step, with the last program of a run."""
    golden, cfg = arrays("tail"), with_dead(config("tiny"))
    shapes = {row["name"]: row for row in SHAPES["tiny"]}
    table, first = T.param_specs(cfg), facts("tail")["first_step"]
    numbers = {name: k for k, name in enumerate(shapes)}

    def drawn(base: int, name: str):
        return draw(base + numbers[name], shapes[name]["shape"])

    base = {name: drawn(SEED * 1000 + 700, name) for name in AVERAGED}
    rest = {name: np.zeros(row["shape"]) for name, row in shapes.items() if name not in AVERAGED}

    @functools.lru_cache(maxsize=16)
    def moved(name, step):
        return (base[name] + 0.1 * drawn(SEED * 1_000_000 + step * 100, name)).astype(np.float32)

    def weights(step):
        adam = max(s for s in (step - 1, step) if updates_at(cfg, "adam")[s])
        event = max(s for s in range(step - 3, step + 1) if updates_at(cfg, "tables")[s])
        last = {"head": adam, "embed": adam, "value_tables": event}
        found = {name: moved(name, last.get(name, step)) for name in AVERAGED}
        return ours(cfg, rest | (tied(found) if step < 1177 else found))

    state = T.map_state(cfg, lambda shape, dtype, row: np.zeros(shape, dtype))
    for step in range(first, cfg.steps):
        now, rates = weights(step), T.hyper_at(cfg, step).average_rates
        updates = T.schedule(cfg).programs[step][1:]
        for name in (name for update in updates for name in T.updated(cfg, update.kind)):
            for tail, _ in table[name].averages:
                rate, old = rates[[*T.AVERAGES].index(tail)], state[tail][name]
                state[tail][name] = old + rate * (now[name] - old)
        for tail, tag in TAGS.items():
            for name, x in back(cfg, state[tail]).items():
                if f"acc/{step}/{tag}/{name}.norm" in golden:
                    check_stored(golden, f"acc/{step}/{tag}/{name}", x, 1e-5)
    want = facts("tail")["norms_before"]
    for name in (name for name, row in table.items() if row.rescaled):
        norm = np.linalg.norm(now[name].astype(np.float64))
        assert norm == pytest.approx(want[{"head": "lm_head"}.get(name, name)], rel=1e-5)
    mesh = mesh_of(8)
    laid = {kind: lay(cfg, x, mesh) for kind, x in (state | {"params": now}).items()}
    ended, copies = program(cfg, 8, "finish")(laid)
    final = back(cfg, strip_padding(cfg, ended["params"]))
    for name in AVERAGED:
        check_stored(golden, f"final/{name}", final[name], 1e-5)
    for name, copy in tables_joined(copies).items():
        np.testing.assert_array_equal(copy, ended["params"][name])


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 2])
def test_validation(devices):
    """Validate one copy of the golden row per device."""
    c = case_parts("eval")
    many = {"val_batch": devices * c.row_tokens, "val_tokens": devices * c.row_tokens}
    run = Training(replace(c.cfg, **many), devices, parameters(c), c.signs)
    tokens = np.tile(c.tokens.astype(np.uint16), (devices, 1))
    known = T.vocabulary(run.cfg, [])
    batch = val_batch(run.cfg, run.mesh, known, tokens, run.cfg.steps - 1)
    of_devices = program(run.cfg, devices, "eval")
    loss, dropped = of_devices(run.copies, run.state["params"]["ngram_table"], batch)
    assert float(loss) / devices == pytest.approx(c.loss_sum_float64, rel=1e-6) and not dropped


@pytest.fixture
def double(tmp_path, monkeypatch):
    """Replace T by a copy of its source with float64 instead of float32. In float32, updates for
    gradients that are only rounding errors depend on the processor."""
    text = (ROOT / "train_gpt.py").read_text().replace("float32", "float64")
    (tmp_path / "doubled.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    with jax.enable_x64(True):
        monkeypatch.setitem(globals(), "T", importlib.import_module("doubled"))
        yield


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("scenario", ["start", "cadence", "untie"])
def test_training_steps(double, scenario, devices):
    """Run our programs with two rows per step. The steps include candidates, the exchange of n-gram
    rows, updates after two and four steps, another stage, a change of YaRN, and the untying.

    In float64, losses equal a float64 run of upstream (differences: 3e-14). Its norms are from a
    float32 run, and another float32 run of upstream differs from them like ours.
    """
    golden, train = arrays("train"), facts("train")
    about, exact = train["scenarios"][scenario], train["float32_vs_float64"][scenario]
    cfg = config("small", train["block"], train["row_tokens"], train["ranks"])
    counts = {int(i): tuple(n) for i, n in train["candidates_by_stage"].items()}
    stages = (replace(s, candidates=counts.get(i, (0,))) for i, s in enumerate(cfg.stages))
    cfg = replace(cfg, stages=tuple(stages), compute_dtype="float64")
    run = Training(cfg, devices, tied(originals("small")), case_parts("stage0").signs)
    offsets, prefix_v = T.loader_state(cfg, mesh_of(1)).offsets, arrays("model")["prefix_table"]
    for at, fact in enumerate(about["steps"]):
        step, count = fact["step"], T.schedule(cfg).candidates[fact["step"]]
        assert stage_at(cfg, step).windows == tuple(fact["windows"])
        tokens = np.empty((train["ranks"], train["row_tokens"] + 1), np.uint16)
        for r, lengths in enumerate(about["row_segments"]):
            rng = np.random.default_rng(about["token_seed_base"] + 2 * step + r)
            tokens[r] = rng.integers(0, 999, tokens.shape[1])
            tokens[r, np.cumsum([0, *lengths[:-1]])] = 999
        each = zip(tokens, offsets, strict=True)
        all_targets, offsets = zip(
            *(T.row_targets(row, o, count, prefix_v) for row, o in each), strict=True
        )
        digests = [sha256(x.candidates) for x in all_targets if count]
        assert (count, digests) == (fact["candidates"], about["sha256_of_candidates_int32"][at])
        all_targets = T.Targets(*(np.stack(x) for x in zip(*all_targets, strict=True)))
        wanted, places = T.request(cfg, tokens[:, :-1], devices, devices)
        grads, loss = run.gradients(
            step, T.Rows(tokens, tokens[:, :-1], places, all_targets), wanted
        )
        assert loss == pytest.approx(sum(exact["row_loss_sums_float64"][at]), rel=1e-11), step
        run.update(step, grads)
        for name, x in back(cfg, strip_padding(cfg, run.state["params"])).items():
            want = float(golden[f"{scenario}/{name}/w.norm"][at])
            if name in ("fc", "proj"):
                x[DEAD] = originals("small")[name][DEAD]
            norm = np.linalg.norm(x.astype(np.float64))
            limit = 1e-5 if x.size > 100 else max(1e-5, 1.1 * exact["weights"])
            assert norm == pytest.approx(want, rel=limit), (name, step)


def sha256(x) -> str:
    """Return the hash of an array as int32."""
    return hashlib.sha256(np.ascontiguousarray(x, "<i4").tobytes()).hexdigest()


def test_schedule_of_every_step():
    """All 1,194 steps, up to float32 rounding."""
    golden, cfg, table = arrays("schedule"), RECORD, T.schedule(RECORD)
    assert cfg.tokens_after(cfg.steps) == golden["total_tokens"] == 328_663_040
    assert cfg.attention_cap == golden["virtual_cap"]
    updates = [updates_at(cfg, "adam"), updates_at(cfg, "tables")]
    adam, events = ([update is not None for update in kind] for kind in updates)
    tied = [step for step, update in enumerate(updates[0]) if update and update.tied]
    assert golden["untie_step"] == max(tied) and sum(events) == 382
    assert tied == np.flatnonzero(golden["tied_during_update"] & adam).tolist()
    yarn = T.yarn(cfg)
    for i, ends in enumerate(golden["boundaries"].tolist()):
        assert tuple(ends) == cfg.boundaries[i : i + 2]
        for freqs, name in zip(yarn[i][0], ("yarn_narrow", "yarn_wide"), strict=True):
            want = golden[name][i]
            found = np.pad(np.repeat(freqs, 2), (0, len(want) - 2 * len(freqs)))
            np.testing.assert_allclose(found, want, rtol=0, atol=3e-7)
    np.testing.assert_array_equal(golden["final_eval"][:2], cfg.val_windows)
    np.testing.assert_allclose(golden["final_eval"][2:], yarn[-1][1], rtol=3e-7)
    stages = [cfg.stages[i] for i in table.stage]
    exact = {
        "stage": table.stage,
        "batch_tokens": [stage.batch_tokens for stage in stages],
        "window_short": [stage.windows[0] for stage in stages],
        "window_long": [stage.windows[1] for stage in stages],
        "doc_cap": [stage.doc_cap for stage in stages],
        "adam_steps": adam,
        "event_steps": events,
        "mtp_count": [len(stage.loss_weights) for stage in stages],
        "candidates": table.candidates,
    }
    for name, column in exact.items():
        np.testing.assert_array_equal(golden[name], column, err_msg=name)
    hyper, parameters = T.Hyper(*map(np.float32, table.hyper)), T.param_specs(cfg)
    summed = np.where(np.arange(cfg.steps) < cfg.table_change, *np.float32(cfg.table_every))
    tables = (parameters[name] for name in ("value_tables", "ngram_table"))
    each = (T.adam_rates(cfg, row, hyper, summed) for row in tables)
    (_, value_decay, _, value_betas, *_), (_, ngram_decay, _, ngram_betas, *_) = each
    rounded = {
        "lr_factor": hyper.lr,
        "momentum": hyper.momentum,
        "fast_beta": hyper.fast_beta,
        "fast_weight": hyper.fast_weight,
        "scale_narrow": hyper.scales[:, 0],
        "scale_wide": hyper.scales[:, 1],
        "mtp_weights": hyper.loss_weights,
        "prefix_weight": hyper.prefix_weight,
        "value_beta1": value_betas[0],
        "value_beta2": value_betas[1],
        "value_wd_mul": value_decay / cfg.decay_adam,
        "ngram_beta2": ngram_betas[1],
        "ngram_wd_mul": ngram_decay / cfg.decay_adam,
    }
    for name, column in rounded.items():
        np.testing.assert_allclose(column, golden[name], rtol=3e-7, err_msg=name)
