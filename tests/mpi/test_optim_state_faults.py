"""State of optimizers that does not fit: an error on every rank, before any tensor travels, and nothing is changed."""

import contextlib
import enum
import functools

import pytest
import torch
from torch.distributed.fsdp import OptimStateKeyType
from torch.distributed.tensor import DTensor, Replicate, Shard

from hpcfsdp.comm.mpi.communicator import MpiCommunicator
from hpcfsdp.comm.torch_group import TorchGroupCommunicator
from hpcfsdp.errors import DisagreementError, HpcfsdpError, StateDictError
from hpcfsdp.fsdp import FullyShardedDataParallel
from hpcfsdp.state.optim.values import same
from tests.mpi import optim_cases as cases, parity
from tests.mpi.models import ORIGINAL
from tests.mpi.optim_cases import WithIgnored, load, show, to_load
from tests.mpi.parity import WIDTH, Around
from tests.mpi.state_dict_cases import line_mesh

pytestmark = pytest.mark.ranks(3)

SQUARE = f"({WIDTH}, {WIDTH})"
NAMES = [name for name, _ in parity.build(Around).named_parameters()]
A_NAME = "of any parameter"


@pytest.fixture
def engine(engines):
    return engines["hpcfsdp"]


def loaded(engine, original):
    """Collective over all ranks. A model whose optimizer has state, which no test changes for longer than it lasts."""
    if original not in engine.known:
        made = cases.make(engine, Around, original=original)
        load(engine, *made, good())
        engine.known[original] = made
    return engine.known[original]


def good():
    """State that fits, which may be changed."""
    return cases.own_memory(cases.plain_trained(Around))


# What carries tensors from rank to rank, and what carries Python objects, by means of these.
_TENSORS = (
    "all_gather_into_tensor",
    "reduce_scatter_tensor",
    "all_reduce",
    "broadcast",
    "all_gather",
    "all_to_all",
    "gather",
    "scatter",
)
_OBJECTS = ("all_gather_object", "broadcast_object", "labelled_barrier")


@pytest.fixture
def no_tensors(monkeypatch):
    """``with no_tensors():`` ranks may tell each other something, and send no tensors."""
    inside = []

    def allowed(method):
        @functools.wraps(method)
        def call(*args, **kwargs):
            inside.append(method)
            try:
                return method(*args, **kwargs)
            finally:
                inside.pop()

        return call

    def refused(method):
        @functools.wraps(method)
        def call(*args, **kwargs):
            assert inside, f"{method.__name__} before all was checked"
            return method(*args, **kwargs)

        return call

    @contextlib.contextmanager
    def patched():
        with monkeypatch.context() as patch:
            for cls in (MpiCommunicator, TorchGroupCommunicator):
                for name in _TENSORS:
                    patch.setattr(cls, name, refused(getattr(cls, name)))
                for name in _OBJECTS:
                    patch.setattr(cls, name, allowed(getattr(cls, name)))
            yield

    return patched


def check_refused(no_tensors, made, call, fragments, *given):
    """Collective over all ranks. `call` raises on each of them, in words that hold all of `fragments`."""
    model, optimizer = made
    before = cases.prints([list(model.parameters()), optimizer.state_dict(), *given])
    with no_tensors(), pytest.raises((StateDictError, DisagreementError)) as raised:
        call()
    assert isinstance(raised.value, HpcfsdpError)
    assert isinstance(raised.value, (ValueError, DisagreementError))
    for fragment in fragments:
        wanted = [repr(name) for name in NAMES] if fragment is A_NAME else [fragment]
        assert any(each in str(raised.value) for each in wanted), f"none of {wanted} is in: {raised.value}"
    assert cases.prints([list(model.parameters()), optimizer.state_dict(), *given]) == before


def check_works(engine, made):
    """Collective over all ranks. Nothing is left of an error, neither in the model nor between the ranks."""
    cases.same_osd(show(engine, *made), cases.plain_trained(Around), ordered=False)
    load(engine, *made, good())
    cases.same_osd(show(engine, *made), cases.plain_trained(Around), ordered=False)


# What one rank alone finds out when it saves: all are told before they gather


def made_odd(optimizer, name, change):
    """A context in which one state of each parameter is what `change` makes of it."""
    return changed_state(optimizer, lambda state: {**state, name: change(state[name])})


@pytest.mark.parametrize(
    ("change", "said"),
    [(lambda value: value.to("meta"), "is on the meta device"), (lambda value: value.to_sparse(), "is sparse_coo")],
    ids=["meta", "sparse"],
)
@pytest.mark.parametrize("name", ["exp_avg", "step"])
@ORIGINAL
def test_tensors_without_readable_values_on_one_rank_are_an_error_on_all(
    engine, no_tensors, change, said, name, original
):
    made, last = loaded(engine, original), engine.comm.size - 1
    for form in ("full", "rank 0", "sharded"):
        with contextlib.ExitStack() as stack:
            if engine.comm.rank == last:
                stack.enter_context(made_odd(made[1], name, change))
            with no_tensors(), pytest.raises(StateDictError) as raised:
                show(engine, *made, form)
        assert f"/{name}' {said}" in str(raised.value)
        assert str(raised.value).startswith(f"rank {last}: ") == (engine.comm.rank != last)
    check_works(engine, made)


@ORIGINAL
def test_a_hook_that_raises_on_one_rank_is_an_error_on_all(engine, several, no_tensors, original):
    made, last = loaded(engine, original), several.size - 1

    def hook(_optimizer):
        if several.rank == last:
            raise OSError("no such file")

    handle = made[1].register_state_dict_pre_hook(hook)
    model, optimizer = made
    for call in (
        lambda: show(engine, *made),
        lambda: engine.cls.full_optim_state_dict(model, optimizer),
        lambda: engine.cls.sharded_optim_state_dict(model, optimizer),
    ):
        with cases.legacy(engine), no_tensors(), pytest.raises((OSError, HpcfsdpError), match="no such file") as raised:
            call()
        assert isinstance(raised.value, OSError) == (several.rank == last)
        assert isinstance(raised.value, OSError) or f"rank {last}: OSError" in str(raised.value)
    handle.remove()
    check_works(engine, made)


@ORIGINAL
def test_a_rank_with_other_settings_of_its_units_is_an_error_on_all(engine, several, no_tensors, original):
    (model, optimizer), last = loaded(engine, original), several.size - 1
    with contextlib.ExitStack() as stack:
        if several.rank == last:
            stack.enter_context(cases.form_of(engine, model.unit, "sharded"))
        with no_tensors(), pytest.raises(StateDictError, match="have different state_dict_type settings") as raised:
            engine.cls.optim_state_dict(model, optimizer)
    assert str(raised.value).startswith(f"rank {last}: ") == (several.rank != last)
    check_works(engine, (model, optimizer))


def local_mode():
    class Mode(enum.IntEnum):
        ONE = 1

    return Mode.ONE


@pytest.mark.parametrize("note", [local_mode(), [torch.eye(2).to_sparse()]], ids=["enumeration", "sparse"])
@ORIGINAL
def test_a_hyperparameter_that_one_rank_cannot_describe_is_an_error_on_all(engine, several, no_tensors, note, original):
    """A number of a class that cannot be pickled, and a tensor that has no list of elements."""
    made, last = loaded(engine, original), several.size - 1
    [group] = made[1].param_groups
    if several.rank == last:
        group["note"] = note
    with no_tensors(), pytest.raises(StateDictError, match=f"'note' in .* rank {last}") as raised:
        show(engine, *made)
    assert "missing" in str(raised.value)
    group["note"] = note
    assert same(show(engine, *made)["param_groups"][0]["note"], note)
    del group["note"]
    check_works(engine, made)


@ORIGINAL
def test_state_of_one_rank_that_others_cannot_read_is_an_error_on_all(engine, several, no_tensors, original):
    _own_rank[:] = [several.rank]
    made, last = loaded(engine, original), several.size - 1
    with contextlib.ExitStack() as stack:
        if several.rank == last:
            stack.enter_context(changed_state(made[1], lambda state: {**state, "note": Local(last)}))
        with no_tensors(), pytest.raises(StateDictError) as raised:
            show(engine, *made)
    expected = "'note'" if several.rank == last else f"optimizer's state or groups of rank {last} cannot be unpickled"
    assert expected in str(raised.value)
    check_works(engine, made)


# What no rank can load. Each changes a state dict that fits, or puts something in its place, and says what the error
# has to name.


def another_model(osd):
    osd["state"]["unit.c.weight"] = osd["state"].pop("unit.a.weight")
    names = osd["param_groups"][0]["params"]
    names[names.index("unit.a.weight")] = "unit.c.weight"
    return osd, ["'unit.c.weight'"]


def further_state(osd):
    osd["state"]["unit.c.weight"] = osd["state"]["unit.a.weight"]
    return osd, ["'unit.c.weight'"]


def numbers(osd):
    plain, optimizer = cases.make_plain(Around)
    cases.load_plain(plain, optimizer, osd)
    return optimizer.state_dict(), ["number", "rekey_optim_state_dict"]


def no_state_of_one(osd):
    del osd["state"]["unit.a.bias"]
    return osd, ["'unit.a.bias'", "exp_avg"]


def no_such_name_of_one(osd):
    del osd["state"]["unit.a.bias"]["exp_avg_sq"]
    return osd, ["'unit.a.bias'", "'exp_avg_sq'"]


def no_mapping(osd):
    osd["state"]["unit.a.bias"] = 5
    return osd, ["'unit.a.bias'", "int"]


def another_shape(osd):
    osd["state"]["unit.a.weight"]["exp_avg"] = torch.zeros(WIDTH * WIDTH, dtype=torch.float64)
    return osd, ["'unit.a.weight'", "'exp_avg'", f"({WIDTH * WIDTH},)", SQUARE]


def of_adafactor(osd):
    """Rows and columns of a whole matrix, of which a rank does not have all."""
    model, _ = cases.make_plain(Around)
    optimizer = torch.optim.Adafactor(model.parameters())
    cases.train_plain(model, optimizer, 1, range(1))
    return cases.plain_osd(model, optimizer), [".weight'", "_var'", "(7, 7)"]


def another_group(osd):
    osd["param_groups"][0]["params"].remove("unit.a.bias")
    osd["param_groups"].append({**osd["param_groups"][0], "params": ["unit.a.bias"]})
    return osd, ["unit.a.bias", "group"]


def no_params(osd):
    del osd["param_groups"][0]["params"]
    return osd, ["'params'", "param_groups"]


EVERYWHERE = [
    another_model,
    further_state,
    numbers,
    no_state_of_one,
    no_such_name_of_one,
    no_mapping,
    another_shape,
    another_group,
    no_params,
]


@pytest.mark.parametrize("form", ["full", "rank 0"])
@pytest.mark.parametrize("change", EVERYWHERE)
@ORIGINAL
def test_state_that_does_not_fit_is_refused(engine, no_tensors, change, original, form):
    made = loaded(engine, original)
    given, fragments = change(good())
    if form == "rank 0" and engine.comm.rank != 0:
        given = {}
    check_refused(no_tensors, made, lambda: to_load(engine, *made, given, form), fragments, given)
    check_works(engine, made)


@pytest.mark.parametrize("given", [None, [], "state", {"param_groups": []}, {"state": []}, {"state": None}], ids=repr)
@pytest.mark.parametrize("form", ["full", "rank 0", "sharded"])
def test_what_is_no_state_dict_is_refused(engine, no_tensors, given, form):
    made = loaded(engine, False)
    fragments = ["'state'"] if isinstance(given, dict) else [type(given).__name__]
    check_refused(no_tensors, made, lambda: to_load(engine, *made, given, form), fragments, given)
    with no_tensors(), pytest.raises(StateDictError) as raised:
        engine.cls.optim_state_dict(*made, given if given is not None else 5)
    assert all(fragment in str(raised.value) for fragment in fragments) or given is None
    check_works(engine, made)


@ORIGINAL
def test_factored_state_is_refused_where_parameters_are_sharded(engine, no_tensors, original):
    if engine.comm.size == 1 and original:
        pytest.skip("one rank has whole matrices")
    model, _ = loaded(engine, original)
    made = model, torch.optim.Adafactor(model.parameters())
    given, fragments = of_adafactor(good())
    check_refused(no_tensors, made, lambda: to_load(engine, *made, given), fragments, given)


# What parameters cannot have that share a flat parameter


def another_step(osd):
    osd["state"]["unit.a.bias"]["step"] = torch.tensor(7.0)
    return osd, ["'unit.a.bias'", "'unit.a.weight'", "'step'", "3.0", "7.0"]


def another_kind(osd):
    osd["state"]["unit.a.bias"]["step"] = 3.0
    return osd, ["'unit.a.bias'", "'unit.a.weight'", "'step'", "float"]


def another_dtype(osd):
    osd["state"]["unit.a.bias"]["exp_avg"] = osd["state"]["unit.a.bias"]["exp_avg"].float()
    return osd, ["'unit.a.bias'", "'unit.a.weight'", "'exp_avg'", "float32", "float64"]


@pytest.mark.parametrize("change", [another_step, another_kind, another_dtype])
def test_state_that_differs_within_a_flat_parameter_is_refused(engine, no_tensors, change):
    made = loaded(engine, False)
    given, fragments = change(good())
    check_refused(no_tensors, made, lambda: to_load(engine, *made, given), fragments, given)
    check_works(engine, made)
    # Parameters that are stepped one by one may differ.
    model, optimizer = cases.make(engine, Around, original=True)
    load(engine, model, optimizer, given)
    assert show(engine, model, optimizer)["state"]["unit.a.bias"]["step"] in (3.0, 7.0)


# What one rank is given and the others are not


def step_there(osd):
    for entry in osd["state"].values():
        entry["step"] = torch.tensor(7.0)
    return osd, ["'step'", "first.weight", "3.0", "7.0"]


def dtype_there(osd):
    for entry in osd["state"].values():
        entry["exp_avg"] = entry["exp_avg"].float()
    return osd, ["'exp_avg'", "first.weight", "float32", "float64"]


def rate_there(osd):
    osd["param_groups"][0]["lr"] = 0.5
    return osd, ["'lr'", "0.5", "0.01"]


def nothing_there(osd):
    return {**osd, "state": {}}, ["first.weight"]


def no_dict_there(osd):
    return list(osd), ["list"]


def shape_there(osd):
    return another_shape(osd)


@pytest.mark.parametrize("change", [step_there, dtype_there, rate_there, nothing_there, no_dict_there, shape_there])
@ORIGINAL
def test_ranks_that_are_given_different_state_all_raise(engine, several, no_tensors, change, original):
    made, last = loaded(engine, original), several.size - 1
    changed, fragments = change(good())
    given = changed if several.rank == last else good()
    call = functools.partial(to_load, engine, *made, given)
    # The rank itself need not be told who it is where only its own state is wrong.
    knows_itself = several.rank == last and change in (nothing_there, no_dict_there, shape_there)
    named = [] if knows_itself else [f"rank {last}"]
    check_refused(no_tensors, made, call, [*fragments, *named], given)
    check_works(engine, made)


@ORIGINAL
def test_whole_tensors_on_one_rank_and_chunks_on_another_are_refused(engine, several, no_tensors, original):
    made, last = loaded(engine, original), several.size - 1
    chunks = show(engine, *made, "sharded")
    given = good() if several.rank == last else chunks
    fragments = [f"rank {last}", "first.weight", "ShardedTensor"]
    check_refused(no_tensors, made, lambda: to_load(engine, *made, given), fragments, given)
    check_works(engine, made)


@ORIGINAL
def test_chunks_on_rank_0_alone_are_refused(engine, no_tensors, original):
    made = loaded(engine, original)
    chunks = show(engine, *made, "sharded")
    if engine.comm.size == 1:
        load(engine, *made, chunks, "rank 0")
    else:
        call = functools.partial(to_load, engine, *made, chunks if engine.comm.rank == 0 else {}, "rank 0")
        check_refused(no_tensors, made, call, ["first.weight", "ShardedTensor"], chunks)
    check_works(engine, made)


@ORIGINAL
def test_tensors_that_lie_on_other_ranks_are_refused(engine, several, no_tensors, original):
    chunks = show(engine, *loaded(engine, original), "sharded")
    given = good()
    given["state"]["last.weight"] = chunks["state"]["last.weight"]  # of what would travel last
    half = several.size // 2
    part = range(half) if several.rank < half else range(half, several.size)
    group = several.subgroup(part)
    made = cases.make(engine, Around, original=original, process_group=group)
    load(engine, *made, good())
    fragments = ["'last.weight'", "ShardedTensor"]
    check_refused(no_tensors, made, lambda: to_load(engine, *made, given), fragments, given)
    check_works(engine, made)


# Optimizers that differ between ranks


def one_of_two_groups(params):
    return torch.optim.AdamW([{"params": params[:1]}, {"params": params[1:]}], lr=1e-2, weight_decay=0.1, eps=1e-5)


def without_one(params):
    return cases.OPTIMIZERS["adamw"](params[:-1])


def faster(params):
    return torch.optim.AdamW(params, lr=0.5, weight_decay=0.1, eps=1e-5)


def with_a_note(params):
    optimizer = cases.OPTIMIZERS["adamw"](params)
    optimizer.param_groups[0]["note"] = "mine"
    return optimizer


@pytest.mark.parametrize(
    ("change", "fragments"),
    [
        (one_of_two_groups, ["group", "1", "2"]),
        (without_one, ["last."]),
        (faster, ["'lr'", "0.5", "0.01"]),
        (with_a_note, ["'note'", "'mine'", "missing"]),
    ],
)
@ORIGINAL
def test_ranks_with_other_groups_of_their_optimizers_all_raise(
    engine, several, no_tensors, change, fragments, original
):
    (model, optimizer), last = loaded(engine, original), several.size - 1
    params = list(model.parameters())
    if change is without_one:
        fragments = [fragments[0] if original else "first."]  # the flat parameter of the root, or the last of all
        params = params if original else params[::-1]
    other = change(params) if several.rank == last else optimizer
    for param in (param for group in other.param_groups for param in group["params"]):
        other.state[param] = optimizer.state[param]
    made = model, other
    for form in ("full", "sharded"):
        check_refused(no_tensors, made, lambda form=form: show(engine, *made, form), [*fragments, f"rank {last}"])
    if change in (one_of_two_groups, without_one):  # hyper-parameters are what the state dict has
        call = functools.partial(to_load, engine, *made, good())
        check_refused(no_tensors, made, call, ["group" if change is one_of_two_groups else fragments[0]])
    check_works(engine, (model, optimizer))


@contextlib.contextmanager
def changed_state(optimizer, change):
    """Another state of each parameter, for as long as the context lasts."""
    before = {param: dict(state) for param, state in optimizer.state.items()}
    for param, state in before.items():
        optimizer.state[param] = change(dict(state))
    if not any(optimizer.state.values()):
        optimizer.state.clear()
    try:
        yield
    finally:
        for param, state in before.items():
            optimizer.state[param] = state


@pytest.mark.parametrize(
    ("change", "fragments"),
    [
        (lambda state: {**state, "step": torch.tensor(7.0)}, ["'step'", "3.0", "7.0"]),
        (lambda state: {**state, "step": 3}, ["'step'", "int"]),
        (lambda state: {**state, "note": "mine"}, ["'note'", "mine"]),
        (lambda state: {**state, "exp_avg": state["exp_avg"].float()}, ["'exp_avg'", "float32", "float64"]),
        (lambda state: {}, ["state"]),
    ],
    ids=["step", "kind", "name", "dtype", "none"],
)
@ORIGINAL
def test_ranks_with_different_state_all_raise(engine, several, no_tensors, change, fragments, original):
    made, last = loaded(engine, original), several.size - 1
    with contextlib.ExitStack() as stack:
        if several.rank == last:
            stack.enter_context(changed_state(made[1], change))
        for form in ("full", "rank 0", "sharded"):
            call = functools.partial(show, engine, *made, form)
            check_refused(no_tensors, made, call, [*fragments, f"rank {last}", A_NAME])
    check_works(engine, made)


@ORIGINAL
def test_state_that_cannot_be_described_by_element_is_refused(engine, no_tensors, original):
    if original and engine.comm.size == 1:
        pytest.skip("parameters that one rank has whole may have any state")
    made = loaded(engine, original)
    with changed_state(made[1], lambda state: {**state, "basis": torch.zeros(3, 5)}):
        for form in ("full", "sharded"):
            check_refused(no_tensors, made, lambda form=form: show(engine, *made, form), ["'basis'", "(3, 5)", A_NAME])
    check_works(engine, made)


# What does not belong together, on any rank


@ORIGINAL
def test_an_optimizer_of_another_model_is_refused(engine, no_tensors, original):
    model, _ = loaded(engine, original)
    _, other = cases.make(engine, Around, original=original)
    for call in (lambda: show(engine, model, other), lambda: to_load(engine, model, other, good())):
        check_refused(no_tensors, (model, other), call, ["optimizer", "model"])


@ORIGINAL
def test_a_model_without_units_is_refused(engine, original):
    plain, optimizer = cases.make_plain(Around)
    for call in (engine.cls.optim_state_dict, engine.cls.full_optim_state_dict):
        with pytest.raises(StateDictError, match="no FullyShardedDataParallel"):
            call(plain, optimizer)


@ORIGINAL
def test_an_optimizer_that_was_built_from_something_else_is_refused(engine, no_tensors, original):
    model, optimizer = made = loaded(engine, original)
    given = good()
    for method in (engine.cls.shard_full_optim_state_dict, engine.cls.scatter_full_optim_state_dict):
        call = functools.partial(method, given, model, list(model.parameters())[1:], optimizer)
        check_refused(no_tensors, made, call, ["optim_input", "optim"], given)


@pytest.mark.parametrize(
    "wrong", [5, [], torch.zeros(2), [5], [{"lr": 1.0}]], ids=["int", "empty", "tensor", "list", "dict"]
)
def test_optim_input_of_another_kind_is_refused(engine, wrong):
    model, _ = loaded(engine, False)
    with pytest.raises((TypeError, ValueError), match="optim_input"):
        engine.cls.shard_full_optim_state_dict(good(), model, optim_input=wrong)


def test_rekeying_what_does_not_fit_is_refused():
    rekey = FullyShardedDataParallel.rekey_optim_state_dict
    plain, optimizer = cases.make_plain(Around)
    cases.load_plain(plain, optimizer, good())
    numbered, before = optimizer.state_dict(), cases.prints(good())
    mixed = {**numbered, "state": {**numbered["state"], "unit.a.bias": {}}}
    with pytest.raises(StateDictError, match="names or all numbers"):
        rekey(mixed, OptimStateKeyType.PARAM_NAME, plain, optim=optimizer)
    stranger, _ = another_model(good())
    with pytest.raises(StateDictError, match=r"unit\.c\.weight"):
        rekey(stranger, OptimStateKeyType.PARAM_ID, plain, optim=optimizer)
    beyond = {**numbered, "state": {**numbered["state"], 99: {}}}
    with pytest.raises(StateDictError, match="99"):
        rekey(beyond, OptimStateKeyType.PARAM_NAME, plain, optim=optimizer)
    other, other_optimizer = cases.make_plain(parity.Nested)
    with pytest.raises(StateDictError, match="model"):
        rekey(numbered, OptimStateKeyType.PARAM_NAME, other, optim=optimizer)
    with pytest.raises(StateDictError, match="list"):
        rekey([], OptimStateKeyType.PARAM_NAME, other, optim=other_optimizer)
    with pytest.raises((StateDictError, TypeError), match="optim_state_key_type"):
        rekey(numbered, "PARAM_NAME", plain, optim=optimizer)
    assert cases.prints(good()) == before


# What one rank alone could find out when others wait already: it is an error on all of them


def with_side():
    """State of a model with a module that `cases.make` leaves to no unit; it may be changed."""
    return cases.own_memory(cases.plain_trained(WithIgnored))


@pytest.mark.parametrize("mesh", [False, True], ids=["ShardedTensor", "DTensor"])
@ORIGINAL
def test_chunks_of_a_parameter_that_is_not_sharded_here_are_refused(engine, no_tensors, original, mesh):
    options = {"device_mesh": line_mesh()} if mesh else {}
    sharded = engine.shard(parity.build(WithIgnored, torch.float64), use_orig_params=original, **options)
    saved = sharded, cases.OPTIMIZERS["adamw"](sharded.parameters())
    load(engine, *saved, with_side())
    chunks = show(engine, *saved, "sharded")
    made = cases.make(engine, WithIgnored, original=original)
    if engine.comm.size == 1:  # which has all of them
        load(engine, *made, chunks)
    else:
        fragments = ["'side.", "DTensor" if mesh else "ShardedTensor", "not sharded here", "full state dict"]
        check_refused(no_tensors, made, lambda: to_load(engine, *made, chunks), fragments, chunks)
        load(engine, *made, with_side())
    cases.same_osd(show(engine, *made), cases.plain_trained(WithIgnored), ordered=False)


@ORIGINAL
def test_a_replicated_tensor_of_a_parameter_that_is_not_sharded_is_its_values(engine, original):
    made = cases.make(engine, WithIgnored, original=original)
    given = with_side()
    for name, entry in given["state"].items():
        if name.startswith("side."):
            for key, value in entry.items():  # the count of steps, too
                entry[key] = DTensor.from_local(value, line_mesh(), [Replicate()], run_check=False)
        entry["step"] = DTensor.from_local(torch.tensor(3.0), line_mesh(), [Replicate()], run_check=False)
    load(engine, *made, given)
    model, optimizer = made
    values = [value for entry in optimizer.state.values() for value in entry.values()]
    assert {type(value) for value in values} == {torch.Tensor}
    cases.same_osd(show(engine, *made), cases.plain_trained(WithIgnored), ordered=False)
    cases.train(engine, model, optimizer, range(1))


def test_distributed_parameters_that_no_unit_owns_keep_distributed_state(engine):
    """As those of a module that is parallel in its own way."""
    model = parity.build(WithIgnored, torch.float64)
    rows = DTensor.from_local(torch.ones(1, WIDTH, dtype=torch.float64), line_mesh(), [Shard(0)], run_check=False)
    model.side.weight = torch.nn.Parameter(rows)
    model = engine.shard(model, ignored_modules=[model.side], use_orig_params=True)
    [param] = [param for param in model.parameters() if isinstance(param, DTensor)]
    optimizer = torch.optim.SGD([param], lr=0.5, momentum=0.5, foreach=False)
    param.grad = torch.ones_like(param)
    optimizer.step()
    shown = show(engine, model, optimizer, "sharded")
    param.grad = torch.ones_like(param)
    optimizer.step()
    load(engine, model, optimizer, shown)
    buffer = optimizer.state[param]["momentum_buffer"]
    assert isinstance(buffer, DTensor)
    assert torch.equal(buffer.to_local(), torch.ones(1, WIDTH, dtype=torch.float64))
    param.grad = torch.ones_like(param)
    optimizer.step()
    assert torch.equal(param.to_local(), torch.full((1, WIDTH), 1 - 0.5 * (1 + 1.5 + 1.5), dtype=torch.float64))


@ORIGINAL
def test_whole_state_of_another_shape_than_the_optimizer_has_it_is_refused(engine, no_tensors, original):
    """Of a parameter that no unit owns, which may have state of any shape where the optimizer has none yet."""
    made = cases.make(engine, WithIgnored, original=original)
    load(engine, *made, with_side())
    given = with_side()
    given["state"]["side.weight"]["exp_avg"] = torch.zeros(WIDTH, 1, dtype=torch.float64)
    for form in ("full", "rank 0"):
        fragments = ["'side.weight'", "'exp_avg'", f"({WIDTH}, 1)", SQUARE]
        check_refused(no_tensors, made, lambda form=form: to_load(engine, *made, given, form), fragments, given)
    load(engine, *made, with_side())


class Uncopyable:
    def __deepcopy__(self, memo):
        raise TypeError("there is one")


@pytest.mark.filterwarnings("ignore:optimizer state 'history' belongs to no parameter")
@pytest.mark.parametrize("name", ["side.weight", "unit.a.weight", "history"])
def test_what_one_rank_cannot_copy_is_an_error_on_all(engine, no_tensors, name):
    made, last = cases.make(engine, WithIgnored, original=True), engine.comm.size - 1
    given = with_side()
    given["state"].setdefault(name, {})["call"] = Uncopyable() if engine.comm.rank == last else 1
    with no_tensors(), pytest.raises(StateDictError, match=f"'call' of '{name}' is a Uncopyable") as raised:
        to_load(engine, *made, given)
    assert str(raised.value).startswith(f"rank {last}: ") == (engine.comm.rank != last)
    load(engine, *made, with_side())
    cases.same_osd(show(engine, *made), cases.plain_trained(WithIgnored), ordered=False)


class Local:
    """Whoever makes it again has to be the rank that made it."""

    def __init__(self, rank):
        self.rank = rank

    def __reduce__(self):
        return _local, (self.rank,)


_own_rank = []


def _local(rank):
    if rank not in _own_rank:
        raise ImportError(f"of rank {rank}")
    return Local(rank)


def test_what_other_ranks_cannot_read_is_an_error_on_all(engine, several, no_tensors):
    _own_rank[:] = [several.rank]
    made = loaded(engine, False)
    given = good()
    given["param_groups"][0]["note"] = Local(0)
    with no_tensors(), pytest.raises(StateDictError, match="cannot be unpickled here") as raised:
        to_load(engine, *made, given if several.rank == 0 else {}, "rank 0")
    assert "ImportError: of rank 0" in str(raised.value)
    check_works(engine, made)


def test_what_lies_beside_state_and_groups_stays_on_rank_0(engine, no_tensors):
    made = loaded(engine, False)
    given = {**good(), "schedule": lambda step: 1.0, "meta": torch.zeros(2, device="meta")}
    found = to_load(engine, *made, given if engine.comm.rank == 0 else {}, "rank 0")
    assert list(found) == ["state", "param_groups"]
    check_works(engine, made)


@pytest.mark.parametrize("form", ["full", "rank 0"])
def test_one_rank_with_other_settings_of_its_units_is_an_error_on_all(engine, several, form):
    model, optimizer = loaded(engine, False)
    last = several.size - 1
    with cases.form_of(engine, model, form), contextlib.ExitStack() as stack:
        if several.rank == last:
            stack.enter_context(cases.form_of(engine, model.unit, "sharded"))
        with pytest.raises(StateDictError, match="have different state_dict_type settings") as raised:
            engine.cls.optim_state_dict_to_load(model, optimizer, good())
        assert str(raised.value).startswith(f"rank {last}: ") == (several.rank != last)
    check_works(engine, (model, optimizer))
