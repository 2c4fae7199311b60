"""The engines' API that the runtime uses is in one table; the installed packages match the CUDA builds."""

import pytest

from tests.factories import ROOT
from tests.runtime.host.engine_api import ABSENT, recorded_api, signature_of
from tests.runtime.host.engine_uses import uses_in

ON_CPU_HOSTS = {"in_vllm.py"}
"""Files whose work is refused on GPUs: CUDA builds need not have what they use (images in prompts)."""


def test_every_use_of_an_engine_in_the_runtime_is_in_the_table() -> None:
    result = uses_in(ROOT / "rlplan" / "runtime")
    missing = {use: file for use, file in result.items() if use not in recorded_api() and file not in ON_CPU_HOSTS}
    assert missing == {}, "add it to engine_api.json and write the table anew (tests/runtime/host/engine_api.py)"
    assert len(result) > 90


def test_the_table_holds_nothing_that_the_cuda_builds_lack() -> None:
    assert [name for name, signature in recorded_api().items() if signature == ABSENT] == []


@pytest.mark.engine
def test_the_installed_packages_have_the_signatures_of_the_cuda_builds() -> None:
    assert {name: signature_of(name) for name in recorded_api()} == recorded_api()
