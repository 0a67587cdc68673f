"""Small programs for the rules, by family of operators, with the splits for which something is gathered."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from rule_contract import Bits, Case, Ids, run_cases

T = torch.Tensor
aten = torch.ops.aten


def _relu_in_place(a: T, b: T) -> T:
    return F.relu(a * b, inplace=True)


def _added_in_place(a: T, b: T) -> T:
    x = a * 2
    x += b
    x.mul_(3).masked_fill_(b > 0, 0.5)
    return x


def _rows_written(a: T, b: T) -> T:
    x = a * 1
    x[:, 1:] = b
    return x * a


def _copied_through_a_view(a: T, b: T) -> T:
    x = torch.zeros_like(a)
    x.view(-1)[:12].copy_(b)
    return x + a


def _view_read_after_writing(a: T) -> T:
    x = a.clone()
    y = x.t()
    x.add_(a)
    return y * 2


def _without_gradient(a: T, b: T) -> tuple[T, T]:
    with torch.no_grad():
        scale = (a * b).sum(-1, keepdim=True)
    return a * scale, (a @ b.t()).detach() + b.sum()


def _used_split_and_whole(a: T, b: T) -> tuple[T, T]:
    x = a * b
    return x.sum(0) + x.flip(0), torch.cumsum(x, 0) @ x.t()


def _used_repeatedly(a: T, b: T) -> T:
    x = a + b
    return F.gelu(x) * x + x.t().reshape(6, 4) - x.mean() * b


def _sizes(a: T) -> T:
    return a.view(a.size(0), -1, 2).sum(-1) / a.shape[1] + torch.arange(a.size(0), dtype=a.dtype)[:, None]


def _numbers(a: T, ids: T) -> tuple[T, T, T]:
    return ids + 1, (ids > 2) & (ids < 4), a * (ids != 0).to(a.dtype)


def _tuples(a: T) -> T:
    first, second = a.chunk(2, 1)
    x, y, z = (first * second).unbind(0)
    return torch.stack([x, y * z], 1) + torch.cat([z, x]).view(-1, 2)


POINTWISE = [
    Case("relu", lambda a: F.relu(a), ((3, 4),)),
    Case("add of rows", lambda a, b: a + b, ((3, 4), (4,))),
    Case("add of columns", lambda a, b: a * b + 1, ((3, 4), (3, 1))),
    Case("where", lambda a, b, c: torch.where(c, a, b), ((3, 4), (4,), Bits((3, 4))), pairs=True),
    Case("where of a number", lambda a, c: torch.where(c, a, 0.5), ((3, 4), Bits((3, 4)))),
    Case("masked_fill", lambda a, c: a.masked_fill(c, -1.0), ((3, 4), Bits((1, 4)))),
    Case("powers", lambda a, b: (a.abs() ** 2.0 + 1).sqrt().rsqrt() * b.exp().log1p(), ((3, 4), (3, 4))),
    Case(
        "activations",
        lambda a: F.gelu(a) + F.silu(a) * F.softplus(a) - F.elu(a) * torch.tanh(a) + F.hardtanh(a),
        ((3, 4),),
    ),
    Case(
        "more activations",
        lambda a: F.selu(a) + F.celu(a) + F.relu6(a) * F.logsigmoid(a) + F.mish(a) + F.hardswish(a) + F.leaky_relu(a),
        ((3, 4),),
    ),
    Case(
        "gelu by tanh",
        lambda a: F.gelu(a, approximate="tanh") + 0.5 * a * (1 + torch.tanh(0.8 * (a + 0.04 * torch.pow(a, 3.0)))),
        ((3, 4),),
    ),
    Case("glu", lambda a: F.glu(a, -1), ((3, 4),), gathers="a1/even a1/uneven"),
    Case("prelu", lambda a, b: F.prelu(a, b), ((3, 4), (4,))),
    Case("prelu of one", lambda a, b: F.prelu(a, b), ((3, 4), (1,))),
    Case("to other types", lambda a: (a.float() * 2).double().type_as(a).contiguous().clone(), ((3, 4),)),
    Case("like it", lambda a: a * torch.ones_like(a) + torch.full_like(a, 2.0) + torch.zeros_like(a), ((3, 4),)),
    Case("compare", lambda a, b: (a > b, a * (a <= b), ~(a == b)), ((3, 4), (3, 4))),
    Case(
        "lerp and clamp",
        lambda a, b: torch.lerp(a, b, 0.3).clamp(-1, 1) + torch.addcmul(a, a, b, value=2.0),
        ((3, 4), (3, 4)),
    ),
    Case("maximum", lambda a, b: torch.maximum(a, b) - torch.minimum(a, b), ((3, 4), (3, 4))),
    Case("atan2", lambda a, b: torch.atan2(a, b) + torch.sin(a) * torch.cos(b), ((3, 4), (3, 4))),
    Case("whole numbers", _numbers, ((3, 4), Ids((3, 4)))),
    Case("dropout that does nothing", lambda a: F.dropout(a, 0.5, False) + F.dropout(a, 0.0, True), ((3, 4),)),
    Case("in three dims", lambda a, b, c: a * b + c, ((2, 3, 4), (3, 1), (2, 1, 4))),
]

IN_PLACE = [
    Case("relu_", _relu_in_place, ((3, 4), (3, 4))),
    Case("add_, mul_, masked_fill_", _added_in_place, ((3, 4), (3, 4))),
    Case("rows written", _rows_written, ((3, 4), (3, 3)), gathers="a0 a1 b0 b1"),
    Case("copy_ through a view", _copied_through_a_view, ((4, 4), (12,)), gathers="a0 a1 b0"),
    Case("a view read after writing", _view_read_after_writing, ((3, 4),), gathers="a0 a1"),
    Case("no_grad and detach", _without_gradient, ((3, 4), (3, 4))),
    Case("split and whole", _used_split_and_whole, ((4, 4), (4, 4)), gathers="a0 b0"),
    Case("used often", _used_repeatedly, ((6, 4), (6, 4)), gathers="a0 a1 b0 b1"),
    Case("sizes", _sizes, ((4, 4),), gathers="a1/uneven"),
    Case("tuples", _tuples, ((3, 4),), gathers="a0 a1"),
]

SHAPE = [
    Case("to heads", lambda a: a.view(2, 3, 4, 2).transpose(1, 2), ((2, 3, 8),), gathers="a2/uneven"),
    Case("from heads", lambda a: a.transpose(1, 2).reshape(2, 3, 8), ((2, 4, 3, 2),)),
    Case("flatten tokens", lambda a: a.view(-1, 4) * 2, ((3, 4, 4),)),
    Case("unflatten tokens", lambda a: a.view(3, 4, 4) * 2, ((12, 4),), gathers="a0"),
    Case("flatten", lambda a: a.flatten(1), ((2, 3, 4),)),
    Case("unflatten", lambda a: a.unflatten(1, (2, 4)), ((2, 8),), gathers="a1/uneven"),
    Case(
        "interleaved halves",
        lambda a: a.view(2, 4, 2)[..., 0] * a.view(2, 4, 2)[..., 1],
        ((2, 8),),
        gathers="a1/uneven",
    ),
    Case("ones", lambda a: a.unsqueeze(0).unsqueeze(-1).squeeze(0).squeeze(-1)[:, None] * 2, ((3, 4),)),
    Case("squeeze", lambda a: a.squeeze() + a.squeeze(1).squeeze(-1), ((3, 1, 4, 1),)),
    Case("permute", lambda a: a.permute(2, 0, 1).movedim(0, 1), ((2, 3, 4),)),
    Case("turned", lambda a: a.t() * 2 + a.T + a.mT, ((3, 4),)),
    Case("expand", lambda a: a.expand(2, 3, 4) + a.expand(3, 4), ((3, 1),)),
    Case("expand_as", lambda a, b: a.expand_as(b) * b, ((3, 1), (2, 3, 4))),
    Case("repeat", lambda a: a.repeat(2, 1, 3), ((2, 4),)),
    Case("repeat_interleave", lambda a: a.repeat_interleave(3, 1), ((2, 4),)),
    Case("repeat_kv", lambda a: a[:, :, None].expand(2, 4, 3, 5, 2).reshape(2, 12, 5, 2), ((2, 4, 5, 2),)),
    Case("select", lambda a: a[:, 1] + a[:, -1], ((3, 4),)),
    Case("unbind", lambda a: torch.stack(a.unbind(1), 0), ((3, 4),), gathers="a1"),
    Case("chunk", lambda a: a.chunk(2, -1)[0] * a.chunk(2, -1)[1], ((3, 8),), gathers="a1/even a1/uneven"),
    Case("split", lambda a: sum(x.sum() for x in a.split([3, 1], 1)) * a.split(2, 0)[0], ((3, 4),), gathers="a0 a1"),
    Case("slices", lambda a: a[:, 1:] * a[:, :-1], ((3, 5),), gathers="a1/segments"),
    Case("slices with steps", lambda a: a[:, ::2] + a[::2, 1:4:2].sum(), ((3, 6),), gathers="a0 a1"),
    Case("narrow", lambda a: a.narrow(1, 1, 3), ((3, 5),), gathers="a1/segments"),
    Case("halves turned", lambda a: torch.cat([-a[..., 4:], a[..., :4]], -1), ((2, 3, 8),)),
    Case("cat", lambda a, b: torch.cat([a, b], 1) * 2, ((3, 4), (3, 2)), pairs=True),
    Case("cat of rows", lambda a, b: torch.cat([a, b], 0) * 2, ((4, 4), (2, 4))),
    Case("stack", lambda a, b: torch.stack([a, b, a], -1), ((3, 4), (3, 4))),
    Case("pad", lambda a: F.pad(a, (1, 2)), ((3, 4),), gathers="a1/segments"),
    Case("flip and roll", lambda a: a.flip(1) + a.roll(1, 1), ((3, 4),), gathers="a1"),
    Case("triangles", lambda a: a.triu() + a.tril(-1), ((3, 4, 4),), gathers="a1 a2"),
    Case("new tensors", lambda a: a + a.new_zeros(3, 4) + a.new_ones(4), ((3, 4),)),
]

MATMUL = [
    Case("linear", lambda a, b, c: F.linear(a, b, c), ((2, 3, 4), (6, 4), (6,)), pairs=True),
    Case("linear without bias", lambda a, b: F.linear(a, b), ((3, 4), (6, 4))),
    Case("linear of one", lambda a, b, c: F.linear(a, b, c), ((4,), (6, 4), (6,))),
    Case("addmm", lambda a, b, c: torch.addmm(a, b, c), ((6,), (3, 4), (4, 6))),
    Case(
        "addmm of a table",
        lambda a, b, c: torch.addmm(a, b, c, beta=2, alpha=3),
        ((3, 6), (3, 4), (4, 6)),
        gathers="b1 c0",
    ),
    Case("matmul", lambda a, b: a @ b, ((2, 3, 4, 5), (2, 3, 5, 4)), pairs=True),
    Case("matmul broadcast", lambda a, b: a @ b, ((2, 3, 4, 5), (5, 4))),
    Case("matmul of one batch", lambda a, b: a @ b, ((1, 4, 5), (3, 5, 4))),
    Case("vectors", lambda a, b: a @ b, ((4,), (4,))),
    Case("matrix and vector", lambda a, b: a @ b, ((3, 4), (4,))),
    Case("bmm", lambda a, b: torch.bmm(a, b), ((2, 3, 4), (2, 4, 3))),
    Case(
        "baddbmm",
        lambda a, b, c: torch.baddbmm(a, b, c, beta=0.5, alpha=2.0),
        ((2, 1, 3), (2, 4, 5), (2, 5, 3)),
        gathers="b2 c1",
    ),
    Case("einsum", lambda a, b: torch.einsum("bid,bjd->bij", a, b), ((2, 3, 4), (2, 5, 4))),
    Case("einsum without result", lambda a, b: torch.einsum("bid,dj", a, b), ((2, 3, 4), (4, 5))),
    Case("einsum with dots", lambda a, b: torch.einsum("...d,de->...e", a, b), ((2, 3, 4), (4, 5))),
    Case("two layers", lambda a, b, c: F.linear(F.gelu(F.linear(a, b)), c), ((3, 4), (6, 4), (4, 6)), pairs=True),
    Case("outer", lambda a, b: torch.outer(a, b), ((3,), (4,))),
    Case("mv and dot", lambda a, b: torch.mv(a, b) + torch.dot(b, b), ((3, 4), (4,))),
]

REDUCTION = [
    Case("sum", lambda a: a.sum() + a.sum(1) + a.sum((0, 1), keepdim=True), ((3, 4),)),
    Case("mean", lambda a: a.mean() * a.mean(-1, keepdim=True) + a.mean(0), ((3, 4),)),
    Case("softmax", lambda a: F.softmax(a, -1) + F.log_softmax(a, -1), ((3, 4),), gathers="a1"),
    Case("logsumexp", lambda a: a.logsumexp(1), ((3, 4),), gathers="a1"),
    Case("amax", lambda a: a.amax(1, keepdim=True) - a.amin(1).unsqueeze(1), ((3, 4),), gathers="a1"),
    Case("max", lambda a: a.max(1).values * a.min(1)[0], ((3, 4),), gathers="a1"),
    Case("argmax", lambda a: a.argmax(-1)[:, None] + a.argmax(-1, keepdim=True), ((3, 4),), gathers="a1"),
    Case("var", lambda a: a.var(-1)[:, None] + a.std(-1, keepdim=True), ((3, 4),), gathers="a1"),
    Case(
        "norms",
        lambda a: torch.linalg.vector_norm(a, dim=-1) + a.norm(dim=-1) + F.normalize(a, dim=-1).sum(-1),
        ((3, 4),),
        gathers="a1",
    ),
    Case("any and all", lambda a: (a > 0).any(-1) | (a > 0).all(-1), ((3, 4),), gathers="a1"),
    Case("prod", lambda a: a.prod(1), ((3, 4),), gathers="a1"),
    Case("topk", lambda a: a.topk(2, -1)[0] * a.sort(-1)[0][:, :2], ((3, 4),), gathers="a1"),
    Case("cumsum", lambda a: a.cumsum(1), ((3, 4),), gathers="a1"),
    Case(
        "root mean square", lambda a, b: a * torch.rsqrt(a.pow(2).mean(-1, keepdim=True) + 1e-6) * b, ((2, 3, 4), (4,))
    ),
    Case("count", lambda a: (a > 0).sum(-1) + (a > 0).sum(), ((3, 4),)),
]

TABLES = [
    Case("embedding", lambda a, b: F.embedding(b, a), ((5, 4), Ids((2, 3))), gathers="a0/segments", pairs=True),
    Case(
        "embedding with padding",
        lambda a, b: F.embedding(b, a, padding_idx=3),
        ((5, 4), Ids((2, 6))),
        gathers="a0/segments",
    ),
    Case("gather", lambda a, b: a.gather(1, b), ((3, 5), Ids((3, 4))), gathers="a1 b1", pairs=True),
    Case("index_select", lambda a, b: a.index_select(1, b), ((3, 5), Ids((4,))), gathers="a1"),
    Case("index", lambda a, b: a[b] * 2, ((5, 4), Ids((2, 3))), gathers="a0", pairs=True),
    Case("index by two", lambda a, b, c: a[b, c], ((5, 5, 4), Ids((3,)), Ids((3,))), gathers="a0 a1"),
    Case("index of columns", lambda a, b: a[:, b], ((3, 5, 2), Ids((4,))), gathers="a1"),
    Case("one_hot", lambda a, b: F.one_hot(b, 5).to(a.dtype) @ a, ((5, 4), Ids((3,)))),
    Case(
        "scatter",
        lambda a, b: torch.zeros(3, 5, dtype=a.dtype).scatter_add(1, b, a),
        ((3, 4), Ids((3, 4))),
        gathers="a1 b1",
    ),
    Case(
        "tril mask",
        lambda a: a.masked_fill(torch.ones(4, 4, dtype=torch.bool).triu(1), -1e4).softmax(-1),
        ((2, 4, 4),),
        gathers="a2",
    ),
]

_QKV = ((2, 4, 5, 4),) * 3


def _attention(**more: Any) -> Any:
    def run(a: T, b: T, c: T, *mask: T) -> T:
        return F.scaled_dot_product_attention(a, b, c, *mask, **more)

    return run


def _manual_attention(a: T, b: T, c: T) -> T:
    scores = (a @ b.transpose(-1, -2) / 2.0).masked_fill(torch.ones(5, 5, dtype=torch.bool).triu(1), float("-inf"))
    return scores.softmax(-1) @ c


def _heads_of_one(a: T, b: T, c: T) -> T:
    """A fused projection, its three parts, attention and the projection back."""
    q, k, v = F.linear(a, b).view(2, 3, 3, 4, 2).permute(2, 0, 3, 1, 4)
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return F.linear(out.transpose(1, 2).reshape(2, 3, 8), c)


ATTENTION = [
    Case("attention", _attention(), _QKV, gathers="a2/segments a3 b2 b3 c2 c3", pairs=True),
    Case("causal attention", _attention(is_causal=True, scale=0.3), _QKV, gathers="a2 a3 b2 b3 c2 c3"),
    Case(
        "grouped attention",
        _attention(enable_gqa=True),
        ((2, 4, 5, 4), (2, 2, 5, 4), (2, 2, 5, 4)),
        gathers="a1/uneven a1/segments a2/segments a3 b2 b3 c2 c3",
        pairs=True,
    ),
    Case(
        "attention with a mask", _attention(), (*_QKV, Bits((2, 1, 1, 5))), gathers="a2/segments a3 b2 b3 c2 c3 d0 d3"
    ),
    Case("attention with a bias", _attention(), (*_QKV, (1, 4, 5, 5)), gathers="a2/segments a3 b2 b3 c2 c3 d1 d2 d3"),
    Case("attention with a table", _attention(), (*_QKV, (5, 5)), gathers="a2/segments a3 b2 b3 c2 c3 d0 d1"),
    Case("attention of batches", _attention(), ((4, 5, 4),) * 3, gathers="a1/segments a2 b1 b2 c1 c2"),
    Case("attention by hand", _manual_attention, _QKV, gathers="b2"),
    Case("fused heads", _heads_of_one, ((2, 3, 8), (24, 8), (8, 8)), gathers="b0", pairs=True),
]

LOSS = [
    Case("mse", lambda a, b: F.mse_loss(a, b) + F.mse_loss(a, b, reduction="sum"), ((3, 4), (3, 4)), pairs=True),
    Case("mse of each", lambda a, b: F.mse_loss(a, b, reduction="none"), ((3, 4), (3, 4))),
    Case(
        "l1 and huber",
        lambda a, b: F.l1_loss(a, b) + F.huber_loss(a, b, delta=0.5) + F.smooth_l1_loss(a, b),
        ((3, 4), (3, 4)),
    ),
    Case(
        "bce",
        lambda a, b, c: F.binary_cross_entropy_with_logits(a, b.sigmoid(), pos_weight=c.detach().exp()),
        ((3, 4), (3, 4), (4,)),
        gathers="c0",
        pairs=True,
    ),
    Case(
        "bce of each", lambda a, b: F.binary_cross_entropy(a.sigmoid(), b.sigmoid(), reduction="none"), ((3, 4), (3, 4))
    ),
    Case(
        "kl",
        lambda a, b: F.kl_div(a.log_softmax(-1), b.softmax(-1), reduction="batchmean"),
        ((3, 4), (3, 4)),
        gathers="a1 b1",
    ),
    Case("kl of logs", lambda a, b: torch.kl_div(a, b, reduction=1, log_target=True), ((3, 4), (3, 4))),
    Case("cross entropy", lambda a, b: F.cross_entropy(a, b), ((6, 5), Ids((6,))), gathers="a1/segments", pairs=True),
    Case(
        "cross entropy of images",
        lambda a, b: F.cross_entropy(a, b, ignore_index=2),
        ((2, 5, 4), Ids((2, 4))),
        gathers="a1/segments",
    ),
    Case(
        "smooth cross entropy",
        lambda a, b: F.cross_entropy(a, b, label_smoothing=0.1, reduction="sum"),
        ((6, 5), Ids((6,))),
        gathers="a1/segments",
    ),
    Case(
        "cross entropy of each",
        lambda a, b: F.cross_entropy(a, b, reduction="none"),
        ((2, 5, 4), Ids((2, 4))),
        gathers="a1/segments",
    ),
    Case(
        "smooth and ignoring",
        lambda a, b: F.cross_entropy(a, b, label_smoothing=0.1, ignore_index=1),
        ((6, 5), Ids((6,))),
        gathers="a1/segments",
    ),
    Case(
        "weighted cross entropy",
        lambda a, b, c: F.cross_entropy(a, b, c.detach().exp()),
        ((6, 5), Ids((6,)), (5,)),
        gathers="a1 c0",
    ),
    Case(
        "smooth weighted",
        lambda a, b, c: F.cross_entropy(a, b, c.detach().exp(), label_smoothing=0.2),
        ((6, 5), Ids((6,)), (5,)),
        gathers="a1 c0",
    ),
    Case("cross entropy of shares", lambda a, b: F.cross_entropy(a, b.softmax(1)), ((6, 5), (6, 5)), gathers="a1 b1"),
    Case("cross entropy of one", lambda a, b: F.cross_entropy(a, b), ((5,), Ids(())), gathers="a0/segments"),
    Case("nll", lambda a, b: F.nll_loss(a.log_softmax(1), b), ((6, 5), Ids((6,))), gathers="a1"),
    Case(
        "nll of images",
        lambda a, b: F.nll_loss(a.log_softmax(1), b, reduction="sum"),
        ((2, 5, 3, 4), Ids((2, 3, 4))),
        gathers="a1",
    ),
    Case(
        "loss from hidden",
        lambda a, b, c: F.cross_entropy(F.linear(a, b)[:, :-1].reshape(-1, 6), c[:, 1:].reshape(-1)),
        ((2, 5, 4), (6, 4), Ids((2, 5))),
        gathers="a1/segments b0/segments c1/segments",
    ),
    Case(
        "loss in the last dim",
        lambda a, b: F.cross_entropy(a.transpose(1, 2), b, reduction="sum") / (b != -100).sum(),
        ((2, 4, 6), Ids((2, 4))),
        gathers="a2/segments",
    ),
]

FAMILIES = {
    "pointwise": POINTWISE,
    "in place": IN_PLACE,
    "shape": SHAPE,
    "matmul": MATMUL,
    "reduction": REDUCTION,
    "tables": TABLES,
    "attention": ATTENTION,
    "loss": LOSS,
}


def run_family(name: str) -> list[str]:
    """On every rank of a world."""
    return run_cases(FAMILIES[name])
