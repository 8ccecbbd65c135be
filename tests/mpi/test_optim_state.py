"""The state of an optimizer under the names of the whole model: as torch has it, and as a plain optimizer has it.

Torch's FSDP1 over gloo says what state dicts look like, a plain model on the data of all ranks what is in them. Where
torch is wrong, or refuses, tests say so.
"""

import functools
import warnings

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffload, MixedPrecision, OptimStateKeyType

from hpcfsdp.errors import StateDictError
from hpcfsdp.fsdp import FullyShardedDataParallel
from tests.mpi import models, optim_cases as cases, parity
from tests.mpi.models import ORIGINAL
from tests.mpi.optim_cases import EXACT, FORMS, KINDS, OPTIMIZERS, SINGLE, load, show, to_load, train, train_plain

pytestmark = pytest.mark.ranks(2, 1, 3)

WAYS = ["FULL_SHARD", "NO_SHARD", "HYBRID_SHARD", "mesh", "square mesh"]
"""Strategies, and meshes: a line of all ranks, and two times two."""


@functools.cache
def line_mesh(ranks):
    return init_device_mesh("cpu", (ranks,))


def options_of(engine, way):
    if way == "mesh":
        return {"device_mesh": line_mesh(engine.comm.size)}
    if way == "square mesh":
        return {"strategy": "HYBRID_SHARD", "device_mesh": parity.square_mesh()}
    return {"strategy": way}


def loaded(engine, original, way="FULL_SHARD"):
    """Collective over all ranks. A model whose optimizer has loaded the state of a plain one; to be left alone."""
    case = "loaded", original, way
    if case not in engine.known:
        made = cases.make(engine, original=original, **options_of(engine, way))
        load(engine, *made, cases.plain_trained())
        engine.known[case] = made
    return engine.known[case]


# Forms


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("way", WAYS)
@ORIGINAL
def test_forms_are_those_of_torch(engine, engines, way, original, form):
    theirs = engines["torch"]
    if form == "local" and "mesh" in way:
        for each in (engine, theirs):
            with pytest.raises((RuntimeError, StateDictError), match="LOCAL_STATE_DICT"):
                show(each, *loaded(each, original, way), form)
        return
    got = show(engine, *loaded(engine, original, way), form)
    if original and form in ("full offloaded", "rank 0 offloaded"):
        # Torch gathers each state into the same memory, and moves it to host memory, which on CPUs copies nothing: all
        # states have the values of the last one. See _allgather_orig_param_states and _unflatten_orig_param_states.
        engine.beyond_torch("original parameters' state in host memory of its own")
        expected = show(theirs, *loaded(theirs, original, way), form.removesuffix(" offloaded"))
    else:
        expected = show(theirs, *loaded(theirs, original, way), form)
    if form.startswith("rank 0") and engine.comm.rank != 0:
        assert got == expected == {}
        return
    if not form.startswith(("full", "rank 0")) and (way == "NO_SHARD" or engine.comm.size == 1):
        # What is not sharded torch shows as ShardedTensors if parameters are flat, and whole if they are not.
        got, expected = cases.whole_osd(engine, got), cases.whole_osd(theirs, expected)
    cases.same_osd(got, expected)
    assert engine.is_torch or cases.shards_lie_here(got)


@pytest.mark.parametrize("form", ["full", "sharded"])
@ORIGINAL
def test_what_is_shown_is_what_was_loaded(engine, original, form):
    model, optimizer = loaded(engine, original)
    got = cases.whole_osd(engine, show(engine, model, optimizer, form))
    cases.same_osd(got, cases.plain_trained(), ordered=original)


@pytest.mark.parametrize("form", ["full", "rank 0", "sharded"])
@ORIGINAL
def test_the_state_of_torch_is_loaded_and_the_other_way_round(engine, engines, original, form):
    """Full state dicts and sharded ones, whose tensors lie on the same ranks of another process group."""
    theirs = engines["torch"]
    for source, target in ((engine, theirs), (theirs, engine)):
        if target.is_torch and form == "sharded" and engine.comm.size == 1:
            continue  # torch takes its own ShardedTensors on one rank for whole ones
        given = show(source, *loaded(source, original), form)
        made = cases.make(target, original=original)
        load(target, *made, given, form)
        cases.same_osd(show(target, *made), cases.plain_trained(), ordered=original)


def walked(value, path=()):
    """The keys of all dicts, and what lists hold, in their order."""
    if isinstance(value, dict):
        yield path, list(value)
        for key, inner in value.items():
            yield from walked(inner, (*path, key))
    elif isinstance(value, list):
        yield path, [len(value), *(inner for inner in value if isinstance(inner, str))]
        for place, inner in enumerate(value):
            yield from walked(inner, (*path, place))


@pytest.mark.parametrize("form", ["full", "sharded", "local"])
@pytest.mark.parametrize("kind", ["adamw", "odd"])
@ORIGINAL
def test_all_ranks_walk_through_state_dicts_in_one_order(engines, several, original, kind, form):
    """Whatever the order of parameters and hyper-parameters in the optimizers of ranks."""
    engine = engines["hpcfsdp"]
    model, _ = cases.make(engine, cases.WithIgnored, kind, original=original)
    params, turn = list(model.parameters()), -1 if several.rank % 2 else 1
    optimizer = OPTIMIZERS[kind]([{"params": params[:2][::turn]}, {"params": params[2:][::turn]}])
    for group in optimizer.param_groups:
        group.update([("first", 1), ("second", 2)][::turn])
    train(engine, model, optimizer, range(2))
    found = show(engine, model, optimizer, form)
    everyone = several.all_gather_object(list(walked(found)))
    assert all(other == everyone[0] for other in everyone)
    names = [name for group in found["param_groups"] for name in group["params"]]
    assert names == list(found["state"])
    with cases.form_of(engine, model, form):
        weights = model.state_dict()
    facts = (list(weights), list(walked(weights._metadata)))
    assert several.all_gather_object(facts) == [facts] * several.size
    load(engine, model, optimizer, found, form)
    cases.same_osd(show(engine, model, optimizer, form), found)


# Round trips


def check_round_trips(engine, model_type=parity.Nested, kind="adamw", *, zero_unused=True, with_plain=True, **options):
    """Train on from the state of a sharded optimizer, sharded and plain, and from that of a plain one, sharded."""
    in_single = kind in cases.DTYPES or model_type is parity.MixedDtypes
    ranks, tolerance = engine.comm.size, SINGLE if in_single else EXACT
    plain, plain_optimizer = cases.make_plain(model_type, kind)
    model, optimizer = cases.make(engine, model_type, kind, **options)
    expected = train_plain(plain, plain_optimizer, ranks, range(2), zero_unused=zero_unused)
    torch.testing.assert_close(train(engine, model, optimizer, range(2)), expected, **tolerance)
    osd, plain_osd = show(engine, model, optimizer), cases.plain_osd(plain, plain_optimizer)
    cases.same_osd(osd, plain_osd, tolerance, ordered=False)
    sharded, before = show(engine, model, optimizer, "sharded"), cases.prints([osd, plain_osd])
    values, plain_values = cases.values_of(engine, model), parity.named(plain)

    expected = train(engine, model, optimizer, range(2, 4))
    last = show(engine, model, optimizer)
    for given, form in ((osd, "full"), (osd, "rank 0"), (sharded, "sharded")):
        again = cases.make(engine, model_type, kind, values=values, **options)
        load(engine, *again, given, form)
        cases.same_osd(show(engine, *again), osd)
        if form != "rank 0":
            assert train(engine, *again, range(2, 4)) == expected
            cases.same_osd(show(engine, *again), last)

    if with_plain:
        again = cases.make_plain(model_type, kind, values)
        cases.load_plain(*again, osd)
        got = train_plain(*again, ranks, range(2, 4), zero_unused=zero_unused)
        torch.testing.assert_close(got, expected, **tolerance)
        again = cases.make(engine, model_type, kind, values=plain_values, **options)
        load(engine, *again, plain_osd)
        torch.testing.assert_close(train(engine, *again, range(2, 4)), expected, **tolerance)
    assert cases.prints([osd, plain_osd]) == before  # neither the optimizers' memory nor changed by loading


FOR_ONE = {"foreach": True, "fused": False, "sgd": False, "nesterov": True, "adagrad": False}
"""Optimizers whose state is like that of others: with one setting of ``use_orig_params``."""


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("kind", "original"),
    [(kind, flag) for kind in OPTIMIZERS for flag in (False, True) if FOR_ONE.get(kind, flag) == flag],
)
def test_optimizers(engine, kind, original):
    if kind == "odd":
        engine.beyond_torch("whole numbers for each element, or states of a parameter that differ in dtype")
    check_round_trips(engine, kind=kind, original=original)


BOTH = (False, True)


@pytest.mark.parametrize(
    ("model_type", "original"),
    [
        *((parity.Uneven, flag) for flag in BOTH),
        *((parity.Frozen, flag) for flag in BOTH),
        *((parity.UnusedParameter, flag) for flag in BOTH),
        *((parity.WithScalars, flag) for flag in BOTH),
        *((cases.WithNothing, flag) for flag in BOTH),
        *((cases.WithIgnored, flag) for flag in BOTH),
        (parity.TiedInUnit, False),
        (parity.FrozenUnit, True),
        (parity.TwiceAndIdle, True),
        (parity.MixedDtypes, False),
        (cases.Outside, True),
    ],
)
def test_models(engine, model_type, original):
    if model_type in (parity.WithScalars, cases.WithNothing):
        engine.beyond_torch("it has no flat parameter of what has no dimensions, and no state of what has no elements")
    if model_type in (parity.Frozen, parity.MixedDtypes):
        engine.beyond_torch("a flat parameter of two dtypes, or with frozen parameters in it")
    check_round_trips(
        engine,
        model_type,
        "momentum" if model_type is parity.MixedDtypes else "adamw",
        original=original,
        # Original parameters that no rank has used have no gradient, as in the plain module; torch's have zeros.
        zero_unused=not original or engine.is_torch,
    )


@pytest.mark.parametrize(
    ("carrier", "strategy", "original"),
    [
        ("hpcfsdp", "SHARD_GRAD_OP", False),
        ("hpcfsdp", "NO_SHARD", False),
        ("hpcfsdp", "NO_SHARD", True),
        ("hpcfsdp", "HYBRID_SHARD", True),
        ("messages", "FULL_SHARD", True),
        ("messages", "_HYBRID_SHARD_ZERO2", False),
        ("two nodes", "FULL_SHARD", False),
        ("gloo", "FULL_SHARD", True),
        ("gloo", "HYBRID_SHARD", False),
    ],
)
def test_strategies_and_carriers(engines, carrier, strategy, original):
    engine = parity.under_test(engines, carrier)
    check_round_trips(engine, original=original, strategy=strategy, with_plain=False)


@pytest.mark.parametrize("way", ["mesh", "square mesh", "offloaded", "whole"])
@ORIGINAL
def test_meshes_offload_and_one_unit(engine, way, original):
    if way == "offloaded":
        engine.beyond_torch("offloading where there is no accelerator")
    options = {"offloaded": {"cpu_offload": CPUOffload(True)}, "whole": {"wrapping": "whole"}}
    options = options.get(way) or options_of(engine, way)
    check_round_trips(engine, original=original, with_plain=False, **options)


@ORIGINAL
def test_mixed_precision_leaves_state_in_the_dtype_of_the_parameters(engine, original):
    mixed = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    engine.beyond_torch("whole numbers for each element, or states of a parameter that differ in dtype")
    made, again = (cases.make(engine, kind="odd", original=original, mixed_precision=mixed) for _ in range(2))
    train(engine, *made, range(2))
    osd = show(engine, *made)
    dtypes = {key: each.dtype for key, each in osd["state"]["norm.weight"].items() if isinstance(each, torch.Tensor)}
    expected = {"average": torch.float64, "largest": torch.float32, "seen": torch.uint8, "total": torch.int64}
    assert dtypes == expected
    load(engine, *again, show(engine, *made, "sharded"), "sharded")
    cases.same_osd(show(engine, *again), osd)


@pytest.mark.parametrize("change", ["units", "original", "strategy"])
def test_state_goes_into_a_model_that_is_sharded_otherwise(engine, change):
    options = {
        "units": ({}, {"wrapping": "whole"}),
        "original": ({"original": False}, {"original": True}),
        "strategy": ({}, {"strategy": "NO_SHARD", "original": True}),
    }[change]
    made = [cases.make(engine, **each) for each in options]
    train(engine, *made[0], range(2))
    values = cases.values_of(engine, made[0][0])
    for source, target in ((0, 1), (1, 0)):
        losses = []
        for form in ("full", "sharded"):
            again = cases.make(engine, values=values, **options[target])
            load(engine, *again, show(engine, *made[source], form), form)
            cases.same_osd(show(engine, *again), show(engine, *made[source]), ordered=False)
            losses.append(train(engine, *again, range(2, 4)))
        assert losses[0] == losses[1]
        load(engine, *made[1], show(engine, *made[0]))  # for the way back


def test_any_number_of_ranks_loads_the_state_of_any_other(world, comm):
    """Sharded over N, whole, in a plain optimizer, sharded over M: each trains on as if nothing had been."""
    groups = {ranks: comm.subgroup(range(ranks)) for ranks in range(1, world.size + 1) if world.rank < ranks}
    plain = models.make_net()
    expected = models.train_plain(plain, models.adamw(plain), range(6))
    written = {}
    for ranks, group in groups.items():
        model = models.shard(models.make_net(), group, use_orig_params=ranks % 2 == 0)
        optimizer = models.adamw(model)
        models.train_sharded(model, optimizer, range(3), group)
        with FullyShardedDataParallel.summon_full_params(model, writeback=False):
            values = {parity.plain_name(name): tensor for name, tensor in parity.named(model).items()}
        written[ranks] = values, FullyShardedDataParallel.optim_state_dict(model, optimizer)
    everything = {
        ranks: world.comm.bcast(written.get(ranks), root=0) for ranks in range(1, world.size + 1)
    }  # rank 0 is in all groups
    for values, osd in everything.values():
        plain = models.make_net()
        cases.set_values(plain, values)
        optimizer = models.adamw(plain)
        cases.load_plain(plain, optimizer, osd)
        osd = cases.plain_osd(plain, optimizer)
        for ranks, group in groups.items():
            net = models.make_net()
            cases.set_values(net, values)
            model = models.shard(net, group, use_orig_params=ranks % 2 == 1)
            again = models.adamw(model)
            again.load_state_dict(FullyShardedDataParallel.optim_state_dict_to_load(model, again, osd))
            got = models.train_sharded(model, again, range(3, 6), group)
            torch.testing.assert_close(got, expected[3:], rtol=1e-5, atol=0)
        got = models.train_plain(plain, optimizer, range(3, 6))
        torch.testing.assert_close(got, expected[3:], rtol=1e-5, atol=0)


# Groups of parameters, and which parameters there are


def several_groups(params):
    return [
        {"params": params[:1], "lr": 0.02, "betas": (0.8, 0.95), "label": "first"},
        {"params": params[1::2], "weight_decay": 0.0, "initial_lr": 0.5, "label": None},
        {"params": params[2::2], "eps": 1e-4, "label": ["a", 2.5]},
    ]


@ORIGINAL
def test_each_group_keeps_all_of_its_hyper_parameters(engine, engines, original):
    shown = []
    for each in (engine, engines["torch"]):
        model, _ = cases.make(each, original=original)
        optimizer = torch.optim.AdamW(several_groups(list(model.parameters())), eps=1e-5)
        train(each, model, optimizer, range(2))
        shown.append(show(each, model, optimizer))
        if each is engine:
            sharded = show(each, model, optimizer, "sharded")
            values, expected = cases.values_of(each, model), train(each, model, optimizer, range(2, 4))
    cases.same_osd(*shown, EXACT)
    osd = shown[0]
    assert osd["param_groups"][1]["initial_lr"] == 0.5
    cases.same_groups(sharded["param_groups"], osd["param_groups"])

    plain, _ = cases.make_plain()
    params = dict(plain.named_parameters())
    groups = [{**group, "params": [params[name] for name in group["params"]]} for group in osd["param_groups"]]
    plain_optimizer = torch.optim.AdamW(groups)
    train_plain(plain, plain_optimizer, engine.comm.size, range(2))
    cases.same_osd(osd, cases.plain_osd(plain, plain_optimizer), EXACT)

    for given, form in ((osd, "full"), (osd, "rank 0"), (sharded, "sharded")):
        model, _ = cases.make(engine, original=original, values=values)
        params = list(model.parameters())
        again = torch.optim.AdamW([{"params": group["params"]} for group in several_groups(params)], lr=9.0)
        load(engine, model, again, given, form)
        same = [{key: value for key, value in group.items() if key != "params"} for group in again.param_groups]
        assert same == [
            {key: value for key, value in group.items() if key != "params"} for group in osd["param_groups"]
        ]
        assert train(engine, model, again, range(2, 4)) == expected


@ORIGINAL
def test_optimizers_of_ranks_may_have_parameters_in_another_order(engine, original):
    model, optimizer = cases.make(engine, original=original)
    params = list(model.parameters())
    turned = params[::-1] if engine.comm.rank % 2 else params
    other, again = (OPTIMIZERS["adamw"](order) for order in (turned, turned[::-1]))
    load(engine, model, optimizer, cases.plain_trained())
    load(engine, model, other, cases.plain_trained())
    expected = show(engine, model, optimizer)
    got = show(engine, model, other)
    cases.same_osd(got, expected, ordered=False)
    load(engine, model, again, show(engine, model, other, "sharded"), "sharded")
    cases.same_osd(show(engine, model, again), expected, ordered=False)
    for param in params:
        for key, value in optimizer.state[param].items():
            assert torch.equal(again.state[param][key], value)


@ORIGINAL
def test_parameters_that_the_optimizer_does_not_step_have_no_state(engine, original):
    if original and engine.comm.size > 1:
        engine.beyond_torch("it raises for a trained parameter of a unit that the optimizer does not step")
    models_ = [cases.make(engine, original=original)[0] for _ in range(2)]
    # Flat parameters are stepped as a whole. Of original ones every second is, so that all units are cut in two.
    optimizers = [OPTIMIZERS["adamw"](list(model.parameters())[::2]) for model in models_]
    train(engine, models_[0], optimizers[0], range(2))
    osd = show(engine, models_[0], optimizers[0])
    names = [name for group in osd["param_groups"] for name in group["params"]]
    assert 0 < len(names) < len(dict(parity.build(parity.Nested).named_parameters()))
    assert set(osd["state"]) == set(names)
    for form in ("full", "sharded"):
        load(engine, models_[1], optimizers[1], show(engine, models_[0], optimizers[0], form), form)
        cases.same_osd(show(engine, models_[1], optimizers[1]), osd)


@ORIGINAL
def test_an_optimizer_that_has_never_stepped_has_no_state(engine, original):
    made, again = (cases.make(engine, original=original) for _ in range(2))
    made[1].param_groups[0]["lr"] = 0.5
    for form in ("full", "rank 0", "sharded"):
        osd = show(engine, *made, form)
        if osd or form != "rank 0":
            assert osd["state"] == {}
            assert set(osd["param_groups"][0]["params"]) == set(cases.plain_trained()["param_groups"][0]["params"])
        load(engine, *again, osd, form)
        assert again[1].param_groups[0]["lr"] == 0.5
        assert not again[1].state


def test_parameters_that_were_frozen_after_some_steps_keep_their_state(engine):
    made, again = (cases.make(engine, original=True) for _ in range(2))
    train(engine, *made, range(2))
    expected = show(engine, *made)
    for model, _ in (made, again):
        for name, param in model.named_parameters():
            param.requires_grad_("norm" not in name)
    cases.same_osd(show(engine, *made), expected)
    load(engine, *again, expected)
    cases.same_osd(show(engine, *again), expected)


# What is loaded


def states_of_all(engine, result):
    """Collective over all ranks. Keys of parameters for which some rank has state."""
    return set().union(*engine.comm.allgather(set(result["state"])))


@pytest.mark.parametrize("form", ["full", "rank 0", "sharded"])
@ORIGINAL
def test_what_the_optimizer_loads(engine, engines, original, form):
    """Numbers of parameters and groups are those of torch; shards are not, which are cut elsewhere."""
    results = []
    for each in (engine, engines["torch"]):
        model, optimizer = loaded(each, original)
        given, before = show(each, model, optimizer, form), cases.prints(optimizer.state_dict())
        print_given = cases.prints(given)
        result = to_load(each, model, optimizer, given, form)
        assert cases.prints(given) == print_given
        assert cases.prints(optimizer.state_dict()) == before
        if each is engine:
            other = cases.make(each, original=original)
            directly = to_load(each, *other, given, form, load_directly=True)
            assert cases.prints(directly) == cases.prints(result)
            assert cases.prints(show(each, *other)) == cases.prints(show(each, model, optimizer))
        results.append(result)
    ours, theirs = results
    cases.same_groups(ours["param_groups"], theirs["param_groups"])
    assert states_of_all(engine, ours) == states_of_all(engine, theirs)


@pytest.mark.parametrize("nothing", [None, {}, {"state": {}, "param_groups": []}, "full"])
@ORIGINAL
def test_only_rank_0_need_have_the_full_state(engine, original, nothing):
    if nothing is None:
        engine.beyond_torch("None on other ranks")
    model, optimizer = loaded(engine, original)
    osd = show(engine, model, optimizer)
    expected = to_load(engine, model, optimizer, osd)
    given = osd if engine.comm.rank == 0 or nothing == "full" else nothing
    assert cases.prints(to_load(engine, model, optimizer, given, "rank 0")) == cases.prints(expected)


@ORIGINAL
def test_without_groups_state_alone_is_loaded(engine, original):
    model, optimizer = loaded(engine, original)
    osd = show(engine, model, optimizer)
    expected = to_load(engine, model, optimizer, osd)
    result = to_load(engine, model, optimizer, {"state": osd["state"]})
    assert cases.prints(result) == {"state": cases.prints(expected["state"])}


@ORIGINAL
def test_the_ranks_may_be_given_as_a_group(engine, world, original):
    model, optimizer = loaded(engine, original)
    group, full = world.process_group, show(engine, model, optimizer)
    expected = cases.prints(to_load(engine, model, optimizer, full))
    with cases.legacy(engine), cases.form_of(engine, model, "full"):
        cases.same_osd(engine.cls.optim_state_dict(model, optimizer, group=group), full)
        sharded = engine.cls.sharded_optim_state_dict(model, optimizer, group=group)
        cases.same_osd(sharded, show(engine, model, optimizer, "sharded"))
        result = engine.cls.scatter_full_optim_state_dict(full, model, optim=optimizer, group=group)
    assert cases.prints(result) == expected
    assert cases.prints(to_load(engine, model, optimizer, full, "rank 0", group=group)) == expected


# The older methods


@ORIGINAL
def test_the_older_methods_show_what_the_new_one_does(engine, engines, original):
    found = []
    for each in (engine, engines["torch"]):
        model, optimizer = loaded(each, original)
        with cases.legacy(each):
            first = each.cls.full_optim_state_dict(model, optimizer)
            everywhere = each.cls.full_optim_state_dict(model, optimizer, rank0_only=False)
            inputs = list(model.parameters()), optimizer.param_groups
            by_input = [each.cls.full_optim_state_dict(model, optimizer, given, False) for given in inputs]
            sharded = each.cls.sharded_optim_state_dict(model, optimizer)
        if each is engine and not engine.is_torch:  # torch's older methods offload, which goes wrong on CPUs, see above
            for got in (everywhere, *by_input):
                cases.same_osd(got, show(each, model, optimizer))
            cases.same_osd(sharded, show(each, model, optimizer, "sharded"))
        if each.comm.rank == 0:
            cases.same_osd(first, everywhere)
        else:
            assert first == {}
        found.append((everywhere, sharded))
    (ours, our_sharded), (theirs, their_sharded) = found
    if original and engine.comm.size > 1:
        assert {fqn: entry.keys() for fqn, entry in ours["state"].items()} == {
            fqn: entry.keys() for fqn, entry in theirs["state"].items()
        }
        cases.same_groups(ours["param_groups"], theirs["param_groups"])
    else:
        cases.same_osd(ours, theirs)
    if engine.comm.size > 1:
        cases.same_osd(our_sharded, their_sharded)


@ORIGINAL
def test_the_older_methods_load_what_the_new_one_does(engine, original):
    model, optimizer = loaded(engine, original)
    full, sharded = show(engine, model, optimizer), show(engine, model, optimizer, "sharded")
    first = full if engine.comm.rank == 0 else None
    cls, before = engine.cls, cases.prints([full, sharded])
    with cases.legacy(engine):
        results = [
            cls.shard_full_optim_state_dict(full, model, optim=optimizer),
            cls.shard_full_optim_state_dict(full, model, optim_input=list(model.parameters())),
            cls.shard_full_optim_state_dict(full, model, optim_input=optimizer.param_groups),
            cls.shard_full_optim_state_dict(full, model),
            cls.scatter_full_optim_state_dict(first, model, optim=optimizer),
            cls.scatter_full_optim_state_dict(first, model, optim_input=list(model.parameters())),
            cls.scatter_full_optim_state_dict(first, model),
            cls.flatten_sharded_optim_state_dict(sharded, model, optimizer),
        ]
    expected = cases.prints(to_load(engine, model, optimizer, full))
    for result in results:
        assert cases.prints(result) == expected
    assert cases.prints([full, sharded]) == before


def reordered(model):
    """An optimizer of two groups, of parameters in another order than the model has them."""
    params = list(model.parameters())
    return torch.optim.AdamW([{"params": params[::-2], "lr": 0.5}, {"params": params[-2::-2]}], lr=1e-2)


def test_names_and_numbers_of_parameters(engine, engines):
    """From numbers to names and back is the identity, wherever parameters stand; and both go where they should."""
    rekey, (by_name, by_number) = engine.cls.rekey_optim_state_dict, OptimStateKeyType
    if by_name.name != "PARAM_NAME":
        by_name, by_number = by_number, by_name
    plain, usual = cases.make_plain()
    train_plain(plain, usual, 1, range(1))
    optimizer = reordered(plain)
    train_plain(plain, optimizer, 1, range(2))
    numbered = optimizer.state_dict()
    with cases.legacy(engine):
        named = rekey(numbered, by_name, plain, optim=optimizer)
        assert rekey(named, by_name, plain, optim=optimizer) == named
        back = rekey(named, by_number, plain, optim=optimizer)
        cases.same_osd(named, cases.plain_osd(plain, optimizer), ordered=False)
        assert cases.prints(back) == cases.prints(numbered)
        assert cases.prints(rekey(back, by_name, plain, optim=optimizer)) == cases.prints(named)
        theirs = engines["torch"].cls.rekey_optim_state_dict(numbered, by_name, plain, optim=optimizer)
        cases.same_osd(named, theirs, ordered=False)
        # By what the optimizer was built from, and by default from model.parameters().
        again = rekey(numbered, by_name, plain, optim_input=optimizer.param_groups)
        assert cases.prints(again) == cases.prints(named)
        cases.same_osd(rekey(usual.state_dict(), by_name, plain), cases.plain_osd(plain, usual), ordered=False)

        # A sharded model's state, for a plain optimizer of another order; and the way back.
        model, sharded_optimizer = loaded(engine, False)
        full = show(engine, model, sharded_optimizer)
        other, _ = cases.make_plain()
        other_optimizer = torch.optim.AdamW(list(other.parameters())[::-1])
        other_optimizer.load_state_dict(rekey(full, by_number, other, optim=other_optimizer))
        cases.same_osd(cases.plain_osd(other, other_optimizer), full, ordered=False)
        given = rekey(other_optimizer.state_dict(), by_name, other, optim=other_optimizer)
    again = cases.make(engine)
    load(engine, *again, given)
    cases.same_osd(show(engine, *again), full)


# Optimizers that go by names


def named_optimizer(model, lr=1e-2):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of what else lies in that package
        from torch.distributed.optim import _NamedOptimizer
    return _NamedOptimizer(model.named_parameters(), torch.optim.AdamW, lr=lr, weight_decay=0.1, eps=1e-5)


def keyed_optimizer(model, lr=1e-2):
    make = functools.partial(torch.optim.AdamW, lr=lr, weight_decay=0.1, eps=1e-5)
    return cases.Keyed(dict(model.named_parameters()), make)


@pytest.mark.parametrize("make", [named_optimizer, keyed_optimizer])
@ORIGINAL
def test_optimizers_that_go_by_names(engine, engines, make, original):
    model, theirs = (cases.make(each, original=original)[0] for each in (engine, engines["torch"]))
    optimizer, other = make(model), make(theirs)
    train(engine, model, optimizer, range(2))
    train(engines["torch"], theirs, other, range(2))
    osd = show(engine, model, optimizer)
    cases.same_osd(osd, show(engines["torch"], theirs, other), EXACT, ordered=False)
    plain, plain_optimizer = cases.make_plain()
    train_plain(plain, plain_optimizer, engine.comm.size, range(2))
    plain_osd = cases.plain_osd(plain, plain_optimizer)
    cases.same_osd(osd, plain_osd, EXACT, ordered=False)

    sharded, values = show(engine, model, optimizer, "sharded"), cases.values_of(engine, model)
    expected = train(engine, model, optimizer, range(2, 4))
    for given, form, tolerance in (
        (osd, "full", None),
        (osd, "rank 0", None),
        (sharded, "sharded", None),
        (plain_osd, "full", EXACT),
    ):
        model, _ = cases.make(engine, original=original, values=values)
        again = make(model, lr=0.0)  # so that making state does not change the model
        again.init_state()
        model.zero_grad()
        load(engine, model, again, given, form, is_named_optimizer=True)
        assert again.state_dict()["param_groups"][0]["lr"] == 1e-2
        cases.same_osd(show(engine, model, again), osd, tolerance, ordered=False)
        torch.testing.assert_close(train(engine, model, again, range(2, 4)), expected, **EXACT)


# State of no parameter


@pytest.mark.parametrize("form", ["full", "rank 0", "sharded"])
@ORIGINAL
def test_state_of_no_parameter_is_copied_and_reported(engine, original, form):
    """Torch copies it when it shows state; when it loads state it looks for it in the wrong dict, and fails."""
    engine.beyond_torch("state of no parameter, loaded")
    model, optimizer = loaded(engine, original)
    given = optimizer.state_dict()
    given["state"] = {**given["state"], "counter": torch.tensor(5), "seen": torch.arange(3.0), "pace": 1.5}
    names = {"counter", "seen", "pace"}
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        osd = show(engine, model, optimizer, form, given)
    assert {name for name in names for each in told if repr(name) in str(each.message)} == (names if osd else set())
    if osd:
        assert torch.equal(osd["state"]["seen"], torch.arange(3.0))
        assert (osd["state"]["counter"].item(), osd["state"]["pace"]) == (5, 1.5)
        assert osd["state"]["seen"].data_ptr() != given["state"]["seen"].data_ptr()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        result = to_load(engine, model, optimizer, osd, form)
    assert torch.equal(result["state"]["seen"], torch.arange(3.0))
    assert (result["state"]["counter"].item(), result["state"]["pace"]) == (5, 1.5)


# Adafactor


def adafactor(engine, values=None, **options):
    model, _ = cases.make(engine, values=values, **options)
    return model, torch.optim.Adafactor(model.parameters(), lr=1e-2)


@ORIGINAL
def test_adafactor(engine, original):
    """Of a flat parameter it keeps the variance of each element; of whole matrices, that of rows and columns."""
    options = {"strategy": "NO_SHARD", "original": original}
    model, optimizer = adafactor(engine, **options)
    train(engine, model, optimizer, range(2))
    osd, sharded = show(engine, model, optimizer), show(engine, model, optimizer, "sharded")
    shapes = {key: tuple(value.shape) for key, value in osd["state"]["first.weight"].items()}
    if original:
        assert shapes == {"step": (), "row_var": (parity.WIDTH, 1), "col_var": (1, parity.WIDTH)}
        plain, _ = cases.make_plain()
        cases.load_plain(plain, torch.optim.Adafactor(plain.parameters()), osd)
    else:
        assert shapes == {"step": (), "variance": (parity.WIDTH, parity.WIDTH)}
    values = cases.values_of(engine, model)
    expected = train(engine, model, optimizer, range(2, 4))
    for given, form in ((osd, "full"), (osd, "rank 0"), (sharded, "sharded")):
        again = adafactor(engine, values, **options)
        load(engine, *again, given, form)
        cases.same_osd(show(engine, *again), osd)
        assert train(engine, *again, range(2, 4)) == expected


def test_configurations_of_another_kind_of_state_dict_are_refused(engine):
    model, _ = loaded(engine, False)
    refused = pytest.raises(RuntimeError, match=r"optim_state_dict_config|Optim")
    with engine.quiet(), refused:
        engine.cls.state_dict_type(model, KINDS.FULL_STATE_DICT, None, FORMS["sharded"][1]()).__enter__()
