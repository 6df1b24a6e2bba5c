"""The fixed cases as pytest tests: `pytest --pyargs harness.conformance --connector my_package.my_module:make_subject`.

A plugin and no conftest, because pytest reads the options of a package that it collects by name too late.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from harness.conformance.case import Case
    from harness.conformance.results import CaseResult

GROUP = "pdproof conformance"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add what names a subject."""
    group = parser.getgroup(GROUP)
    group.addoption(
        "--connector", default="reference", metavar="reference|MODULE:FUNCTION",
        help="of `--pyargs harness.conformance`: what to test, the reference's or what a function of yours makes",
    )  # fmt: skip
    group.addoption(
        "--kv-transfer-config", default="", metavar="JSON",
        help="of `--pyargs harness.conformance`: a connector of vLLM's, named as vLLM names it",
    )  # fmt: skip
    group.addoption(
        "--conformance-seed", type=int, default=2, help="of `--pyargs harness.conformance`: of all chance"
    )  # fmt: skip


class Trials:
    """Tries cases on the subject that the options name, in a process of its own."""

    def __init__(self, config: pytest.Config, factory: pytest.TempPathFactory) -> None:
        from harness.conformance.naming import named
        from harness.conformance.run import Trier

        name = named(config.getoption("--connector"), config.getoption("--kv-transfer-config"))
        self._trier = Trier(name, config.getoption("--conformance-seed"), factory.mktemp("conformance"))

    def result(self, case: Case) -> CaseResult:
        """Return what comes of a case."""
        return self._trier.result(case)

    def close(self) -> None:
        """End the subject."""
        self._trier.close()


@pytest.fixture(scope="session")
def conformance(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trials]:
    """The subject under test. One that cannot be made ends the run with one clear line."""
    from harness.errors import PdproofError

    try:
        trials = Trials(request.config, tmp_path_factory)
    except PdproofError as error:
        pytest.exit(f"pdproof: {error}", returncode=error.exit_code)
    yield trials
    trials.close()
