import pytest


def pytest_addoption(parser):
    parser.addoption("--run-dir", help="folder of a run on 2 ranks (8 steps) that was resumed on 3 (4 more)")


@pytest.fixture
def run_dir(request):
    from pathlib import Path

    given = request.config.getoption("--run-dir")
    if given is None:
        pytest.skip("needs --run-dir: the run that .ci/run makes")
    return Path(given)
