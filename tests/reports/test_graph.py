"""The data-flow graph of a model: traced edges, folding, cuts of a plan, fusion, text and page."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import command
import pytest
import torch
import torch.nn.functional as F
from report_browser import needs_browser, visit
from torch import nn

import drumline as dl
from drumline.clusters import load
from drumline.core.errors import CorruptFile, InputError
from drumline.costs.fusion import fused_chains
from drumline.costs.graph_cuts import graph_cuts
from drumline.models import Profile
from drumline.models.data_flow import DataFlow
from drumline.plans import Plan
from drumline.reports.graph_page import graph_page
from drumline.reports.graph_text import MOST_NODES, graph_document, graph_lines
from drumline.reports.graph_view import BATCH, GraphView, graph_view
from drumline.tracing import trace

ROOT = Path(__file__).parents[2]
A100 = load("dgx-a100")


def traced(model: Any, sample: Any, loss: Any = F.mse_loss, *, batch: int = 8) -> tuple[Profile, DataFlow]:
    job = dl.Job(model=model, loss=loss, optimizer=torch.optim.AdamW, data=lambda: [sample] * 20, batch_size=batch)
    profile = trace(job, data_flow=True)
    assert profile.data_flow is not None
    return profile, profile.data_flow


def view_of(profile: Profile, flow: DataFlow, *, n: float = 8, **more: Any) -> GraphView:
    return graph_view(profile, flow, fused_chains(flow), n=n, **more)


def edges(view: GraphView) -> dict[str, dict[str, float]]:
    """node -> source -> bytes"""
    names = {BATCH: "batch"} | {k: node.label for k, node in enumerate(view.nodes)}
    return {node.label: {names[e.source]: e.bytes for e in node.edges} for node in view.nodes}


class UNet(nn.Module):
    """Two levels; the skip connections are written in the model, not in a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.d1, self.d2 = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 16, 3, padding=1)
        self.mid, self.up = nn.Conv2d(16, 16, 3, padding=1), nn.Conv2d(32, 8, 3, padding=1)
        self.out = nn.Conv2d(16, 1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a = self.d1(x)
        b = self.d2(a)
        c = self.up(torch.cat([self.mid(b), b], 1))
        return self.out(torch.cat([c, a], 1))


IMAGE = (torch.zeros(3, 16, 16), torch.zeros(1, 16, 16))


def test_skip_connections_of_a_unet_come_from_the_trace() -> None:
    graph = edges(view_of(*traced(UNet, IMAGE)))
    pixels = 8 * 16 * 16 * 4
    assert graph["d1"] == {"batch": 3 * pixels}
    assert graph["cat"] == {"mid": 16 * pixels, "d2": 16 * pixels}
    assert graph["cat #2"] == {"up": 8 * pixels, "d1": 8 * pixels}
    assert graph["out"] == {"cat #2": 16 * pixels}
    assert graph["loss"] == {"out": pixels, "batch": pixels}


def test_a_pipeline_sends_what_later_stages_read() -> None:
    profile, flow = traced(UNet, IMAGE)
    cuts = graph_cuts(profile, flow, Plan.parse("pp=3,micro=8,split=mid+up"), A100)
    pixels = 16 * 16 * 4
    sent = {(t.src, t.dst): t.bytes for t in cuts.transfers}
    assert sent == {(0, 1): 16 * pixels, (0, 2): 8 * pixels, (1, 2): 32 * pixels}
    assert [t.skips for t in cuts.transfers] == [False, True, False]
    lines = "\n".join(graph_lines(view_of(profile, flow, cuts=cuts), width=80))
    assert "receives 8.00 KiB (1 value) from stage 0, past the stages between" in lines
    whole = graph_cuts(profile, flow, Plan.parse("dp=4,zero=3"), A100)
    assert whole.starts == (0,) and whole.notes == (
        "dp=4,zero=3 cuts nothing: every rank runs the whole graph on its own samples",
    )
    half = graph_cuts(profile, flow, Plan.parse("pp=3,micro=8,split=mid+up,precision=bf16"), A100)
    assert [t.bytes for t in half.transfers] == [b / 2 for b in sent.values()]


def test_the_engine_sends_the_same_bytes() -> None:
    from drumline.runtime.dry_run import dry_run

    class Masked(UNet):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            mask = torch.arange(16) % 2  # no value of the batch: every stage computes it for itself
            return super().forward(x * mask) * mask

    plan = Plan.parse("pp=3,micro=8,split=mid+up")
    job = dl.Job(model=Masked, loss=F.mse_loss, optimizer=torch.optim.AdamW, data=lambda: [IMAGE] * 20, batch_size=8)
    sent: dict[tuple[int, int], float] = {}
    for rank in dry_run(job, plan).ranks:
        for message in rank.messages:
            src, dst = message.ranks[:2]
            if message.name == "send" and src < dst:
                sent[src, dst] = sent.get((src, dst), 0.0) + message.bytes
    profile, flow = traced(Masked, IMAGE)
    cuts = graph_cuts(profile, flow, plan, A100)
    assert {(t.src, t.dst): 8 * t.bytes for t in cuts.transfers} == sent  # eight micro-batches


class Chain(nn.Module):
    """(x * 2).exp() + 1 in three operators; the backward needs the result of exp."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.linear(x) * 2.0).exp() + 1.0


def test_fusion_saves_reads_and_writes_of_values_inside_a_chain() -> None:
    _, flow = traced(Chain, (torch.zeros(16), torch.zeros(16)))
    (chain,) = fused_chains(flow)
    assert [flow.operators[i].name for i in chain.operators] == ["mul", "exp", "add"]
    value = 8 * 16 * 4
    assert chain.read.at(8) == 2 * value  # of mul's result by exp, of exp's by add
    assert chain.written.at(8) == value  # exp keeps its result for the backward


class Detour(nn.Module):
    """a + f(a) with a matmul in f: fusing both elementwise operators would close a cycle."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a = x * self.linear.bias
        return a + self.linear(a)


def test_no_chain_goes_around_another_operator() -> None:
    _, flow = traced(Detour, (torch.zeros(16), torch.zeros(16)))
    assert [op.name for op in flow.operators if op.elementwise][:2] == ["mul", "add"]
    assert fused_chains(flow) == ()


def test_views_and_writes_in_place() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = nn.Linear(8, 24)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q, k, v = self.qkv(x).chunk(3, -1)
            y = torch.baddbmm(v.unsqueeze(1), q.unsqueeze(1), k.unsqueeze(2) * torch.ones(8)).squeeze(1)
            return y.clamp(min=0.0).add_(q)

    _, flow = traced(Net, (torch.zeros(8), torch.zeros(8)))
    names = [op.name for op in flow.operators]
    product = names.index("baddbmm")
    linear = names.index("addmm")
    sizes = {flow.values[v].writer: size.at(1) for v, size in flow.read_by[product]}
    assert sizes[linear] == 2 * 8 * 4  # q and v, two thirds of one value
    add = names.index("add_")
    assert set(flow.needs[add]) == {names.index("clamp"), linear}
    loss = names.index("mse_loss")
    assert flow.needs[loss] == (add,)  # the value after the write, not the one before


def test_tied_weights_and_folded_blocks_of_the_example() -> None:
    profile = dl.profile(str(ROOT / "examples" / "gpt.py"), data_flow=True)
    assert profile.data_flow is not None
    view = view_of(profile, profile.data_flow, n=32)
    by_name = {node.label: node for node in view.nodes}
    assert by_name["head"].tied == ("token.weight",)
    assert by_name["blocks.0-3"].repeats == 4 and len(by_name["blocks.0-3"].operators) == 10
    assert edges(view)["blocks.0-3"] == {"add": 32 * 64 * 128 * 4.0}
    assert view.work == pytest.approx(profile.flops("forward").at(32))
    one = view_of(profile, profile.data_flow, n=32, layer="blocks.1")
    assert len(one.nodes) == 10
    attention = next(node for node in one.nodes if node.kind == "attention")
    assert sum(e.bytes for e in attention.edges) == 3 * 32 * 64 * 128 * 4  # queries, keys and values
    deep = view_of(profile, profile.data_flow, n=32, depth=2)
    assert {"blocks.0.qkv", "blocks.3.down"} <= {node.label for node in deep.nodes}
    cuts = graph_cuts(profile, profile.data_flow, Plan.parse("pp=2,tp=2,micro=4"), A100)
    split = view_of(profile, profile.data_flow, n=cuts.samples, cuts=cuts)
    assert [node.label for node in split.nodes if node.repeats > 1] == ["blocks.0-1", "blocks.2-3"]
    assert all(len(line) <= 40 for line in graph_lines(split, width=40))


def test_an_lstm_is_a_chain_of_its_tokens() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm, self.head = nn.LSTM(8, 16, batch_first=True), nn.Linear(16, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.lstm(x)[0])  # type: ignore[no-any-return]

    view = view_of(*traced(Net, (torch.zeros(12, 8), torch.zeros(12, 4))))
    graph = edges(view)
    assert graph["lstm"]["batch"] == 8 * 12 * 8 * 4
    assert graph["head"] == {"lstm": 8 * 12 * 16 * 4.0}
    (lstm,) = [node for node in view.nodes if node.label == "lstm"]
    assert lstm.depth >= 12 * (7 + 4)


def test_the_residuals_of_a_hugging_face_model() -> None:
    pytest.importorskip("transformers")
    import hf_jobs

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = hf_jobs.llama()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.net(x).logits  # type: ignore[no-any-return]

    def loss(y: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(y.flatten(0, 1), t.flatten())

    tokens = torch.zeros(hf_jobs.LENGTH, dtype=torch.long)
    profile, flow = traced(Net, (tokens, tokens), loss)
    blocks = next(node for node in view_of(profile, flow).nodes if node.repeats == 2)
    assert blocks.label == "net.model.layers.0-1"
    inside = view_of(profile, flow, layer="net.model.layers.0")
    skips = [node for node in inside.nodes if node.label.startswith("add") and any(e.skips for e in node.edges)]
    assert skips, "the residual around attention is an edge past the operators between"
    assert any(len(chain.operators) > 1 for chain in fused_chains(flow))


def test_large_graphs_are_cut_with_a_count() -> None:
    class Long(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(4 + i % 2, 4 + (i + 1) % 2) for i in range(100))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x)
            return x

    view = view_of(*traced(Long, (torch.zeros(4), torch.zeros(4))))
    assert len(view.nodes) == 101
    assert f"... {101 - MOST_NODES} nodes left out ..." in graph_lines(view, width=40)


def test_a_saved_profile_has_its_graph(tmp_path: Path) -> None:
    profile, _ = traced(UNet, IMAGE)
    profile.save(tmp_path / "p.json")
    assert Profile.load(tmp_path / "p.json") == profile
    document = json.loads((tmp_path / "p.json").read_text())
    document["data_flow"]["reads"][0]["reader"] = 999
    (tmp_path / "p.json").write_text(json.dumps(document))
    with pytest.raises(CorruptFile, match="operator 999 of 8 reads value 0"):
        Profile.load(tmp_path / "p.json")


def test_graph_refusals(tmp_path: Path) -> None:
    profile, flow = traced(UNet, IMAGE)
    with pytest.raises(InputError, match="--layer d3: no such layer"):
        view_of(profile, flow, layer="d3")
    with pytest.raises(InputError, match="--depth 0"):
        view_of(profile, flow, depth=0)
    done = command.here("profile", "gpt:125m", "--graph")
    assert done.returncode == 2 and "made by formula, not traced" in done.stderr
    done = command.here("profile", "gpt:125m", "--page", "x.html")
    assert done.returncode == 2 and "--page without --graph" in done.stderr


def test_the_command_writes_text_json_and_page(tmp_path: Path) -> None:
    traced(UNet, IMAGE)[0].save(tmp_path / "p.json")
    words = ("profile", "p.json", "--graph", "--plan", "pp=2,micro=4", "--cluster", "dgx-a100")
    done = command.here(*words, "--page", "g.html", cwd=tmp_path, COLUMNS="40")
    assert done.returncode == 0, done.stderr
    assert max(map(len, done.stdout.splitlines())) <= 40
    assert "-- stage 1" in done.stdout and "average" in done.stdout
    assert (tmp_path / "g.html").stat().st_size < 100_000
    done = command.here(*words, "--json", cwd=tmp_path)
    document = json.loads(done.stdout)["graph"]
    assert document["plan"]["transfers"] and document["nodes"][0]["name"] == "d1"
    assert document["average_parallelism"] == pytest.approx(document["work"] / document["depth"])


@needs_browser
@pytest.mark.parametrize(("width", "dark"), [(400, True), (1280, False)])
def test_the_page_in_a_browser(width: int, dark: bool, tmp_path: Path) -> None:
    class Evil(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.add_module("<script>alert(1)</script>", UNet())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return next(self.children())(x)  # type: ignore[no-any-return]

    profile, flow = traced(Evil, IMAGE)
    page = tmp_path / "graph.html"
    page.write_text(graph_page(view_of(profile, flow, depth=2), A100), encoding="utf-8")
    document, console = visit(page, width=width, dark=dark)
    assert console == [] and 'data-ready="yes"' in document
    assert "<script>alert" not in document and "&lt;script&gt;alert" in document


def test_the_document_names_every_edge() -> None:
    profile, flow = traced(UNet, IMAGE)
    nodes = graph_document(view_of(profile, flow), None)["nodes"]
    cat = next(node for node in nodes if node["name"] == "cat #2")
    assert {read["from"]: read["skips"] for read in cat["reads"]} == {"up": False, "d1": True}


def test_a_layer_that_runs_twice_is_two_nodes_with_its_own_weights() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.block = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x)
            for _ in range(2):
                x = x + self.block(x)
            return x

    view = view_of(*traced(Twice, (torch.zeros(8), torch.zeros(8))))
    assert [node.label for node in view.nodes] == ["first", "block", "add", "block #2", "add #2", "loss"]
    assert all(not node.tied for node in view.nodes)
    assert edges(view)["add #2"] == {"add": 256.0, "block #2": 256.0}
