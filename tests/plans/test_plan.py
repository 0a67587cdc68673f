"""The plan: notation and file round-trip, and invalid values are refused with the rule."""

from __future__ import annotations

import math
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from drumline.core.errors import PlanError
from drumline.plans import Plan, check
from drumline.plans.combinations import TESTED_VALUES, UNRESTRICTED_KEYS, refusal
from drumline.plans.keys import (
    BytesKey,
    ChoiceKey,
    CountKey,
    FlagKey,
    KeyType,
    LayersKey,
    PatternKey,
    TileKey,
    key_table,
)
from drumline.plans.plan import KEYS

counts = st.integers(1, 10_000_000)
PATTERNED = ("allreduce", "server", "async", "stale:0", "local:16", "gossip:random", "none", "nesterov:0.7:.9")
"""Words of the keys whose values follow a pattern."""
layer_names = st.from_regex(r"[a-z_][a-z_0-9]{0,8}(\.[0-9]{1,3})?", fullmatch=True)


def values_of(key_type: KeyType) -> st.SearchStrategy[Any]:
    """Valid values of a key, by its type."""
    if isinstance(key_type, ChoiceKey):
        return st.sampled_from(key_type.choices)
    if isinstance(key_type, PatternKey):
        return st.sampled_from([word for word in PATTERNED if key_type.check(word)])
    return {
        CountKey: counts,
        FlagKey: st.booleans(),
        BytesKey: st.integers(1, 2**40),
        TileKey: st.tuples(st.integers(1, 9), st.integers(1, 9)),
        LayersKey: st.lists(layer_names, max_size=3).map(tuple),
    }[type(key_type)]


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """Any valid plan."""
    values = {name: draw(values_of(key.type)) for name, key in KEYS.items()}
    values["shard"] = shard = draw(st.integers(0, 1000))
    values["dp"] = dp = max(1, shard) * draw(st.integers(1, 1000))
    values["ep"] = math.gcd(draw(counts), shard or dp)  # a divisor
    return Plan(**values)


@given(plans())
def test_notation_round_trip(plan: Plan) -> None:
    assert Plan.parse(str(plan)) == plan
    assert Plan.from_table(plan.table(), "here") == plan
    assert hash(Plan.parse(str(plan))) == hash(plan)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(plans())
def test_file_round_trip(tmp_path: Path, plan: Plan) -> None:
    plan.save(tmp_path / "p.toml", "why")
    assert Plan.load(tmp_path / "p.toml") == plan


def test_only_non_default_keys_are_written() -> None:
    assert str(Plan()) == "dp=1"
    assert str(Plan(dp=4, zero=3, tile=(2, 2), split=("a", "b"), compile=True)) == (
        "dp=4,zero=3,split=a+b,tile=2x2,compile=true"
    )
    assert Plan.parse("") == Plan.parse(" , ") == Plan()
    assert Plan.parse(" dp = 2 , bucket=1MiB") == Plan(dp=2, bucket=2**20)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "recomputee=full",
            "unknown key 'recomputee' in a plan\n.*recomputee=full.*\n  try:   Did you mean 'recompute'?",
        ),
        ("qq=1", "unknown key 'qq' in a plan\n  where: plan 'qq=1'$"),
        ("dp", "'dp' in the plan 'dp'\n  rule:  a plan is key=value"),
        ("dp=", "'dp=' in the plan"),
        ("dp=2,dp=3", "'dp' is given twice"),
        ("dp=two", "dp=two\n  where: plan 'dp=two'\n  rule:  dp is a whole number"),
        ("dp=2.5", "dp=2.5\n.*\n  rule:  dp is a whole number"),
        ("dp=0", "dp=0\n.*\n  rule:  dp is a whole number from 1 to 10000000"),
        ("dp=-1", "from 1 to"),
        ("dp=10000001", "from 1 to 10000000"),
        ("dp=" + "9" * 5000, "dp is a whole number"),
        ("zero=4", "zero=4\n.*\n  rule:  zero is 0, 1, 2 or 3"),
        (
            "recompute=ful",
            "recompute=ful\n.*\n  rule:  recompute is none, selective or full\n  try:   Did you mean 'full'?",
        ),
        ("precision=fp64", "precision is fp32, tf32, bf16"),
        ("schedule=f1b", "Did you mean '1f1b'?"),
        ("sync=stale", "sync is allreduce, server, async, stale:k, hogwild, local:k, gossip or gossip:random"),
        ("sync=stale:-1", "stale:k.*\n  try:   the nearest that works: sync=stale:0"),
        ("dp=8,sync=stale:-1,micro=2", "k of stale:k is a whole number from 0 to 9999999\n.*micro=2,sync=stale:0"),
        ("dp=8,sync=stale:-1", "the nearest that works: dp=8,sync=stale:0"),
        ("sync=stale:" + "9" * 20, "from 0 to 9999999\n  try:   the nearest that works: sync=stale:9999999"),
        ("dp=8,sync=async,servers=0", "from 1 to 10000000\n  try:   the nearest that works: dp=8,sync=async,servers=1"),
        ("dp=8,sync=async,servers=-1", "the nearest that works: dp=8,sync=async,servers=1"),
        ("dp=8,sync=server,backup=-1", "from 0 to 10000000\n.*works: dp=8,sync=server,backup=0"),
        ("dp=8,sync=async,damping=foo", "damping is none or inverse\n.*works: dp=8,sync=async,damping=none"),
        ("dp=8,sync=async,damping=foo,servers=0", "works: servers=1"),
        ("sync=asynch", "the nearest that works: sync=async"),
        ("sync=local:0", "local:k"),
        ("dp=4,shard=3", "shard=3 with dp=4\n.*\n  rule:  shard divides dp: 4 % 3 != 0"),
        ("tile=2", "tile is rows x columns such as 2x2"),
        ("tile=0x2", "tile=0x2\n.*\n  rule:  tile is rows x columns such as 2x2, each at least 1"),
        ("tile=2x2x2", "tile is rows x columns"),
        ("compile=maybe", "compile is true or false"),
        ("bucket=large", "bucket is a size such as 25MiB"),
        ("bucket=0", "bucket=0\n.*\n  rule:  bucket is a size such as 25MiB, at least 1 byte"),
        ("bucket=-5MB", "at least 1 byte"),
        ("bucket=inf", "bucket is a size"),
    ],
)
def test_refused(text: str, words: str) -> None:
    with pytest.raises(PlanError, match=words.replace("?", r"\?").replace("+", r"\+")):
        Plan.parse(text)


@pytest.mark.parametrize("value", [True, 2.0, "two", None, [2]])
def test_counts_in_files_are_whole_numbers(tmp_path: Path, value: Any) -> None:
    with pytest.raises(PlanError, match="rule:  dp is a whole number"):
        Plan.from_table({"dp": value}, "p.toml")


def test_errors_name_the_file(tmp_path: Path) -> None:
    (tmp_path / "p.toml").write_text("dp = 2\nmicroo = 3\n")
    with pytest.raises(PlanError, match=r"unknown key 'microo'.*\n  where: .*p\.toml\n  try:   Did you mean 'micro'\?"):
        Plan.load(tmp_path / "p.toml")
    (tmp_path / "p.toml").write_text("dp = ")
    with pytest.raises(PlanError, match=r"p\.toml is not TOML"):
        Plan.load(tmp_path / "p.toml")


@given(plans())
def test_mesh(plan: Plan) -> None:
    assert plan.ranks == plan.pp * plan.dp * plan.tile[0] * plan.tile[1] * plan.cp * plan.tp
    assert plan.shards == ((plan.shard or plan.dp) if plan.zero else 1)
    assert plan.mesh.length("replica") * plan.mesh.length("shard") == plan.dp


def test_mesh_order() -> None:
    plan = Plan.parse("dp=6,shard=3,zero=1,tp=2,pp=4,cp=5,tile=1x2")
    assert str(plan.mesh) == "pp(4) x replica(2) x shard(3) x tile(2) x cp(5) x tp(2)"
    assert str(Plan.parse("dp=6").mesh) == "replica(6)"


@pytest.mark.parametrize(
    ("text", "exact"),
    [
        ("dp=2,zero=3,precision=bf16", True),
        ("dp=2,sync=server", True),
        ("dp=2,sync=server,backup=1", False),
        ("dp=2,sync=stale:0", True),
        ("dp=1,sync=async", True),
        ("dp=1,sync=local:4,outer=nesterov", False),
        ("dp=2,sync=stale:2", False),
        ("compress=powersgd", False),
        ("precision=fp8", False),
        ("precision=bf16-pure", False),
        ("dp=2,sync=async", False),
        ("dp=2,sync=local:4", False),
        ("pp=2,schedule=pipedream", False),
        ("pp=2,micro=2,schedule=pipedream-2bw", False),
        ("pp=1,schedule=pipedream", True),
    ],
)
def test_exact(text: str, exact: bool) -> None:
    assert Plan.parse(text).exact is exact


@pytest.mark.parametrize(
    "text",
    [
        "dp=3",
        "dp=4,zero=3,shard=4",
        "zero=3,recompute=full,precision=bf16,micro=7,bucket=1",
        "dp=4,zero=1,shard=2",
        "dp=2,zero=2,precision=fp16",
        "dp=2,compress=powersgd",
        "zero=3,offload=all",
        "offload=optimizer",
        "compile=true",
        "dp=3,backend=threads",
        "dp=2,static=true",
        "tp=2",
        "pp=4,micro=8,schedule=zero-bubble",
        "tile=2x2,dp=2,zero=1",
        "cp=2,tp=2,dp=2,zero=2",
        "pp=2,split=a,recompute=full",
        "dp=4,ep=2",
        "pp=1,schedule=pipedream",
        "pp=4,dp=2,schedule=pipedream,recompute=full",
        "pp=4,micro=4,schedule=pipedream-2bw,precision=bf16",
    ],
)
def test_supported(text: str) -> None:
    check(Plan.parse(text))


@pytest.mark.parametrize(
    ("text", "rule", "works"),
    [
        ("dp=2,zero=3,sync=hogwild", "zero=3 needs replicas that meet in every step", "dp=2,sync=hogwild"),
        ("dp=2,tp=2,sync=local:4", "tp=2 needs replicas", "dp=2,sync=local:4"),
        ("dp=2,sync=async,servers=3", "at most one server per worker, servers <= dp", "dp=2,sync=async,servers=2"),
        ("dp=2,sync=server,backup=2", "backup < dp", "dp=2,sync=server,backup=1"),
        ("dp=2,sync=async,backup=1", "only sync=server", "dp=2,sync=server,backup=1"),
        ("dp=4,sync=local:8,across=12", "multiple of k", "dp=4,sync=local:8,across=16"),
        ("dp=2,sync=server,damping=inverse", "older weights", "dp=2,sync=server"),
        ("dp=2,sync=gossip,precision=fp16", "loss scale", "dp=2,precision=bf16,sync=gossip"),
        ("pp=2,micro=4,schedule=pipedream", "whole batches follow each other", "dp=1,pp=2,schedule=pipedream"),
        ("pp=4,micro=2,schedule=pipedream-2bw", "micro >= pp", "dp=1,pp=4,schedule=pipedream-2bw,micro=4"),
        ("dp=2,pp=2,zero=1,schedule=pipedream", "whole older weights", "dp=2,pp=2,schedule=pipedream"),
        ("pp=2,tp=2,schedule=pipedream", "only pp and dp are tested", "dp=1,pp=2,schedule=pipedream"),
        ("pp=2,virtual=2,schedule=pipedream", "only pp and dp are tested", "dp=1,pp=2,schedule=pipedream"),
        ("pp=2,schedule=pipedream,precision=fp16", "loss scale", "dp=1,pp=2,schedule=pipedream,precision=bf16"),
    ],
)
def test_approximate_plans_are_refused_with_the_nearest_plan_that_runs(text: str, rule: str, works: str) -> None:
    with pytest.raises(PlanError) as caught:
        check(Plan.parse(text))
    assert rule in caught.value.rule
    assert caught.value.fix == f"the nearest plan that runs: {works}"
    check(Plan.parse(works))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("split=a+b", "virtual, split or schedule without pp"),
        ("pp=2,zero=2", "zero=2 with pp"),
        ("tp=2,zero=3", "zero=3 with a split model"),
        ("tp=2,chunk=2", "a split model with compress, static, chunk"),
        ("pp=2,recompute=full,schedule=zero-bubble", "zero-bubble with recompute"),
        ("tp=2,recompute=selective", "a split model with recompute=selective or offload"),
        ("dp=2,shard=2", "shard without zero"),
        ("dp=2,zero=2,offload=all", "offload=all below zero=3"),
        ("dp=2,zero=1,compress=fp16", "compress with zero"),
        ("dp=2,zero=1,static=true", "static with zero"),
        ("dp=2,backend=threads,zero=1", "backend=threads with zero"),
        ("dp=2,static=true,micro=2", "static with micro"),
        ("dp=2,backend=threads,recompute=full", "backend=threads with recompute"),
        ("dp=2,compress=powersgd,precision=fp16", "compress=powersgd with precision=fp16"),
    ],
)
def test_conflicts(text: str, words: str) -> None:
    """Refused with a reason and a fix, although each value alone is supported."""
    with pytest.raises(PlanError, match=f"the engine does not run {words}") as caught:
        check(Plan.parse(text))
    assert caught.value.rule
    assert caught.value.fix
    assert refusal(Plan.parse(text))


def test_processes() -> None:
    assert Plan.parse("dp=3,backend=threads").processes == 1
    assert Plan.parse("dp=3").processes == 3


def test_tested_values_are_of_existing_keys() -> None:
    keys = {f.name for f in fields(Plan)}
    assert set(TESTED_VALUES) <= keys
    assert keys >= UNRESTRICTED_KEYS
    assert all(f.default in TESTED_VALUES[f.name] for f in fields(Plan) if f.name in TESTED_VALUES)
    assert refusal(Plan()) == ""


def test_documentation_has_the_table_of_keys() -> None:
    page = Path(__file__).parents[2] / "docs" / "notation.md"
    assert key_table(Plan) in page.read_text(), f"paste into {page}:\n{key_table(Plan)}"


def test_reading_and_writing_are_inverse() -> None:
    for name, key in KEYS.items():
        default = getattr(Plan(), name)
        assert key.type.read(key.type.write(default)) == default, name


def test_all_wrong_keys_of_a_plan_are_listed_at_once(tmp_path: Path) -> None:
    path = tmp_path / "p.toml"
    path.write_text('dp = 2\nmicroo = 4\nrecompute = "some"\nqq = 1\n')
    with pytest.raises(PlanError) as e:
        Plan.load(path)
    assert str(e.value).splitlines() == [
        "2 keys are wrong or missing",
        f"  where: {path}",
        "  rule:  unknown key 'microo' in a plan; Did you mean 'micro'?",
        "         unknown key 'qq' in a plan",
    ]
