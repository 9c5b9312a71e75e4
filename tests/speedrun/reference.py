"""The model a second time, in NumPy float64, without jax and without a look at the first.

Written from the description of record 77, with loops over rows, layers, heads and tokens. It reads
the parameters of train_gpt.py (name -> array, in logical shapes), its Config and its Hyper.
"""

import numpy as np


def exact(params):
    """The parameters as float64."""
    return {name: np.asarray(x, np.float64) for name, x in params.items()}


def rms(x):
    return x / np.sqrt(np.mean(x**2, -1, keepdims=True) + 2.0**-23)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def turned(x_h, position: int, freqs):
    """One head of one token as complex numbers, i with i + h/2; half of them stand still."""
    h = len(x_h)
    pairs = x_h[: h // 2] + 1j * x_h[h // 2 :]
    pairs[: h // 4] *= np.exp(-1j * position * freqs)
    return np.concatenate([pairs.real, pairs.imag])


def wrapped(x: int) -> int:
    """A Python integer as int32 arithmetic leaves it."""
    return (x + 2**31) % 2**32 - 2**31


def bigrams(tokens_t, table_rows: int) -> list[int]:
    """The row of the bigram table for every token of a row."""
    found = [table_rows - 1]
    for at in range(1, len(tokens_t)):
        before = int(tokens_t[at - 1]) if at > 1 else table_rows - 1
        mixed = wrapped(36313 * int(tokens_t[at])) ^ wrapped(27191 * before)
        found.append(mixed % (table_rows - 1))  # of Python: never negative
    return found


def attention(cfg, params, i, x_td, values_td, document_t, window, hyper):
    """What the attention of layer i makes of one row, one query at a time, before its weight."""
    (t, d), n = x_td.shape, cfg.heads
    h, paired = d // n, i in cfg.paired_layers
    place = [j for j in range(cfg.layers) if j != cfg.skip[1]].index(i)
    weights = params["attn_bank"][4 * place : 4 * place + 4]
    q, k, v = ((x_td @ (params["qkv_lambda"][i] * w).T).reshape(t, n, h) for w in weights[:3])
    q, k = rms(q), rms(k)
    for token, head in np.ndindex(t, n):
        position = 2 * token + head % 2 if paired else token
        for x in (q, k):
            x[token, head] = turned(x[token, head], position, hyper.freqs)
    if i in cfg.long_layers:
        still = [*range(h // 4, h // 2), *range(3 * h // 4, h)]
        for token in range(t - 1, 0, -1):
            k[token][:, still] = k[token - 1][:, still]
    if values_td is not None:
        both = np.concatenate([x_td[:, :6], values_td[:, :6]], 1)
        features = x_td[:, :12] if paired else both
        gates = params["value_gate"][cfg.value_layers.index(i)]
        v = v + 2 * sigmoid(features @ gates.T)[:, :, None] * values_td.reshape(t, n, h)
    # What a head walks along: tokens, or in pairs every token twice, its first half of heads first.
    if paired:
        walks = [[(u, a + n // 2 * half) for u in range(t) for half in (0, 1)]
                 for a in range(n // 2)]  # fmt: skip
    else:
        walks = [[(u, a) for u in range(t)] for a in range(n)]
    out = np.zeros_like(v)
    for walk in walks:
        for at, (token, head) in enumerate(walk):
            near = walk[max(0, at - window) : at + 1]
            seen = [(u, a) for u, a in near if document_t[u] == document_t[token]]
            keys, values = (np.array([x[pair] for pair in seen]) for x in (k, v))
            weight = np.exp(hyper.attn_scale * (keys @ q[token, head]))
            out[token, head] = weight @ values / weight.sum()
    out *= sigmoid(x_td[:, :12] @ params["attn_gate"][place].T)[:, :, None]
    return out.reshape(t, d) @ (params["o_lambda"][i] * weights[3]).T


def mlp(cfg, params, i, x_td):
    """What the MLP of layer i makes of one row, before its weight."""
    up, down = params["mlp_bank"][i], params["mlp_bank"][cfg.layers + i]
    return np.maximum(x_td @ up.T, 0) ** 2 @ down


def one_row(cfg, params, tokens_t, windows, hyper):
    """The normed output of the last layer for one row."""
    document_t = np.cumsum(tokens_t == cfg.bos)
    bigram = params["bigram_table"][bigrams(tokens_t, cfg.bigram_rows)]
    embedded = params["embed"][tokens_t]
    x0 = embedded.copy()
    amount = params["smear_lambda"] * sigmoid(embedded[1:, :12] @ params["smear_gate"].T)
    x0[1:] += amount * embedded[:-1]
    x0 = rms(x0)
    skip_gate = 2 * sigmoid(params["skip_lambda"]) * sigmoid(x0[:, :12] @ params["skip_gate"].T)
    x = x0 + params["bigram_lambdas"][0] * bigram
    after = []
    for i in range(cfg.layers):
        if i == cfg.skip[1]:
            x = x + skip_gate * after[cfg.skip[0]]
        else:
            values = None
            if i in cfg.value_layers:
                first = cfg.vocab * cfg.value_layers.index(i)
                values = params["value_tables"][first : first + cfg.vocab][tokens_t]
            source = rms(after[cfg.backout]) if i > cfg.backout else rms(x)
            window = windows[1] if i in cfg.long_layers else windows[0]
            y = attention(cfg, params, i, source, values, document_t, window, hyper)
            x = params["resid_lambdas"][i, 0] * x + params["post_lambdas"][i, 0] * y
            x = x + params["x0_lambdas"][i] * x0
            if i > 0:
                x = x + params["bigram_lambdas"][i] * bigram
        y = mlp(cfg, params, i, rms(x))
        x = params["resid_lambdas"][i, 1] * x + params["post_lambdas"][i, 1] * y
        after.append(x)
    return rms(x - params["backout_lambda"] * after[cfg.backout])


def forward(cfg, params, tokens, windows, hyper):
    """The normed output of the last layer for rows [b, t]: [b, t, d]."""
    hyper = hyper._replace(freqs=hyper.freqs.astype(np.float64))
    return np.stack([one_row(cfg, exact(params), row, windows, hyper) for row in tokens])


def losses(x_rd, head_vd, cfg):
    """Cross-entropy [r, v] of every id as the target of every token, by a stable log-softmax."""
    a, b, c = cfg.logit_cap
    logits = a * sigmoid((np.asarray(x_rd, np.float64) @ np.asarray(head_vd, np.float64).T + b) / c)
    top = logits.max(-1, keepdims=True)
    return top + np.log(np.exp(logits - top).sum(-1, keepdims=True)) - logits


def loss_sums(cfg, params, tokens, windows, hyper) -> tuple[float, float]:
    """(weighted loss of all targets, plain loss on the next token) of rows [b, t+1]."""
    x_btd = forward(cfg, params, tokens[:, :-1], windows, hyper)
    total = plain = 0.0
    for x_td, row in zip(x_btd, tokens, strict=True):
        losses_tv = losses(x_td, params["head"], cfg)
        for token in range(len(row) - 1):
            plain += losses_tv[token, row[token + 1]]
            for ahead, weight in enumerate(hyper.weights.astype(float), start=1):
                if token + ahead < len(row):
                    total += weight * losses_tv[token, row[token + ahead]]
    return total, plain
