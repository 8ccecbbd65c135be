import pytest
from torch import nn
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    LocalOptimStateDictConfig,
    LocalStateDictConfig,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictSettings,
    StateDictType,
)

from hpcfsdp.comm.fake import FakeCommunicator
from hpcfsdp.errors import StateDictError
from hpcfsdp.fsdp import FullyShardedDataParallel
from hpcfsdp.state.settings import default_settings, make_settings, set_kind, settings_of

FULL, SHARDED, LOCAL = StateDictType.FULL_STATE_DICT, StateDictType.SHARDED_STATE_DICT, StateDictType.LOCAL_STATE_DICT


def shard(module):
    return FullyShardedDataParallel(module, FakeCommunicator())


@pytest.fixture
def model():
    return shard(nn.Sequential(nn.Linear(2, 2), shard(nn.Linear(2, 2))))


@pytest.mark.parametrize(
    ("kind", "config", "optim_config"),
    [
        (FULL, FullStateDictConfig, FullOptimStateDictConfig),
        (SHARDED, ShardedStateDictConfig, ShardedOptimStateDictConfig),
        (LOCAL, LocalStateDictConfig, LocalOptimStateDictConfig),
    ],
)
def test_configurations_are_torchs_defaults_unless_they_are_given(kind, config, optim_config):
    assert make_settings(kind, None, None) == StateDictSettings(kind, config(), optim_config())
    given = config(offload_to_cpu=True), optim_config(offload_to_cpu=False)
    assert make_settings(kind, *given) == StateDictSettings(kind, *given)


def test_a_new_model_gives_whole_tensors_on_every_rank(model):
    assert settings_of(model) == default_settings()
    assert default_settings() == StateDictSettings(FULL, FullStateDictConfig(), FullOptimStateDictConfig())


@pytest.mark.parametrize(
    ("error", "arguments", "message"),
    [
        (TypeError, ("full", None, None), "state_dict_type must be a StateDictType, not 'full'"),
        (TypeError, (None, None, None), "state_dict_type must be a StateDictType, not None"),
        (TypeError, ([], None, None), "state_dict_type must be a StateDictType"),
        (
            StateDictError,
            (SHARDED, FullStateDictConfig(), None),
            "state_dict_config for SHARDED_STATE_DICT must be a ShardedStateDictConfig, not a FullStateDictConfig",
        ),
        (
            StateDictError,
            (FULL, None, LocalOptimStateDictConfig()),
            "optim_state_dict_config for FULL_STATE_DICT must be a FullOptimStateDictConfig, not a LocalOptim",
        ),
    ],
)
def test_a_configuration_of_another_kind_is_refused_and_nothing_set(model, error, arguments, message):
    with pytest.raises(error) as caught:
        set_kind(model, *arguments)
    assert message in str(caught.value)
    assert settings_of(model) == default_settings()


def test_every_unit_is_set_and_returns_its_setting_before(model):
    config = FullStateDictConfig(rank0_only=True)
    outer = nn.ModuleList([model])
    before = set_kind(outer, FULL, config, None)
    assert before == [(model._unit, default_settings()), (model.module[1]._unit, default_settings())]
    assert settings_of(outer) == settings_of(model.module[1]) == make_settings(FULL, config, None)
    assert set_kind(model, LOCAL, None, None)[0] == (model._unit, make_settings(FULL, config, None))


def test_units_do_not_share_what_they_are_set_to(model):
    config = ShardedStateDictConfig()
    set_kind(model, SHARDED, config, None)
    config.offload_to_cpu = True
    model._unit.state_dict_settings.state_dict_config._use_dtensor = True
    assert not model.module[1]._unit.state_dict_settings.state_dict_config.offload_to_cpu
    assert not model.module[1]._unit.state_dict_settings.state_dict_config._use_dtensor
    assert settings_of(model) is model._unit.state_dict_settings  # one unit may have a mesh, and another none


def test_units_that_are_set_differently_are_named(model):
    set_kind(model.module[1], LOCAL, None, None)
    with pytest.raises(
        StateDictError, match=r"'the root' is set to .*FULL.*'_fsdp_wrapped_module\.1' to .*LOCAL.*whole model"
    ):
        settings_of(model)
    set_kind(model, LOCAL, None, None)
    assert settings_of(model).state_dict_type is LOCAL


@pytest.mark.parametrize("ask", [settings_of, lambda module: set_kind(module, FULL, None, None)])
def test_a_module_without_units_has_no_settings(ask):
    with pytest.raises(StateDictError, match="no FullyShardedDataParallel in this Linear: wrap the model first"):
        ask(nn.Linear(1, 1))
