"""Roles of kernels by name: what no role claims of the committed rows, and the names that a role must tell apart."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import pytest

from harness.registry import default_registry
from harness.store import latest, read_folder
from implementations.deepgemm import DeepGemm
from implementations.sonicmoe_torch import SonicMoETorch
from plots.breakdown_series import PARTS, UNCLAIMED, parts, present_role
from plots.rows import RESULTS

#: At most this share of a call's kernels may be without a role.
OURS = {"sonicmoe_official": 0.02, "sonicmoe_triton": 0.02}
OTHERS = 0.10


def unclaimed(implementation: str, kernels: Iterable[Mapping[str, Any]]) -> float:
    found = parts(kernels, present_role(implementation))
    return found.get(UNCLAIMED, 0.0) / sum(found.values())


def committed() -> dict[tuple[str, str], list[Mapping[str, Any]]]:
    """Measured rows with kernels, by implementation and pass."""
    rows, problems = read_folder(RESULTS / "nvidia_h200")
    assert not problems
    found: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for row in latest(rows):
        if row["record"] == "measurement" and row["operation"] in ("moe_layer", "dense_bound") and row.get("kernels"):
            found.setdefault((row["implementation"], row["pass"]), []).append(row)
    return found


ROWS = committed()


@pytest.mark.parametrize(("implementation", "direction"), ROWS)
def test_little_is_without_a_role(implementation: str, direction: str) -> None:
    rows = ROWS[implementation, direction]
    assert len({str(row["shape"]) for row in rows}) >= 12
    shares = {str(row["shape"]): unclaimed(implementation, row["kernels"]) for row in rows}
    worst = max(shares, key=lambda shape: shares[shape])
    assert shares[worst] <= OURS.get(implementation, OTHERS), worst


@pytest.mark.parametrize("implementation", sorted({name for name, _ in ROWS}))
def test_roles_are_known(implementation: str) -> None:
    roles = {role for _, role in default_registry().get(implementation).kernel_roles}
    assert "other" not in parts(({"name": "", "us": 1.0, "role": role} for role in roles), lambda name: None)
    assert roles <= {*PARTS, "grouped_gemm"}


def test_an_unknown_kernel_stays_without_a_role() -> None:
    for implementation in sorted({name for name, _ in ROWS}):
        assert present_role(implementation)("void somebody::new_kernel<float>(float*)") is None


@pytest.mark.parametrize(
    ("implementation", "name", "role"),
    [
        # The aggregation as a batch of matrices, its gradient, and the router's GEMMs beside them.
        ("scattermoe", "nvjet_sm90_tst_384x8_64x4_2x1_v_bz_NNT", "aggregation"),
        ("scattermoe", "nvjet_sm90_tst_8x64_64x16_1x1_h_bz_TNN", "aggregation"),
        ("scattermoe", "nvjet_sm90_tst_96x64_64x8_1x2_h_bz_splitK_NTN", "router"),
        ("torch_loop", "nvjet_sm90_tst_128x64_64x8_1x2_h_bz_TNT", "gemm"),
        ("megablocks", "nvjet_sm90_tst_128x64_64x8_1x2_h_bz_NTN", "dW"),
        ("megablocks", "_padded_copy_wgrad", "router"),
        ("sonicmoe_triton", "nvjet_sm90_tst_128x64_64x8_1x2_h_bz_NTN", "router"),
        ("sonicmoe_triton", "gluon_up_weight_gradient_kernel", "dW1"),
        ("torch_grouped_mm", "void at::cuda::detail::prepare_grouped_gemm_data<cutlass::bfloat16_t>", "grouped_gemm"),
        ("torch_grouped_mm", "triton_poi_fused__to_copy_add_index_select_select_0", "aggregation"),
        ("torch_grouped_mm", "triton_poi_fused__to_copy_index_select_mul_unsqueeze_1", "gather"),
        ("deepgemm", "void at::native::vectorized_gather_kernel<16, long>(char*)", "aggregation"),
        ("deepgemm", "void at::native::vectorized_gather_kernel<16, int>(char*)", "gather"),
    ],
)
def test_names_that_differ_by_little(implementation: str, name: str, role: str) -> None:
    assert present_role(implementation)(name) == role


@pytest.mark.parametrize("mangled", [False, True])
def test_gemms_of_equal_sizes_are_told_apart_by_their_layout(mangled: bool) -> None:
    """With d = 2n the up-projection of rows has the sizes of dX."""
    plugin = DeepGemm()
    plugin._sizes = (4096, 2048)

    def name(layout: int) -> str:
        if mangled:
            return f"_ZN9deep_gemm19sm90_bf16_gemm_implILN4cute4UMMA5MajorE0ELS3_{layout}ELj0ELj4096ELj4096ELj64E"
        majors = f"(cute::UMMA::Major)0, (cute::UMMA::Major){layout}"
        return f"void deep_gemm::sm90_bf16_gemm_impl<{majors}, 0u, 4096u, 4096u, 64u, 128u>"

    assert [plugin.kernel_role(name(layout)) for layout in (0, 1)] == ["up", "dX"]


def test_a_loop_over_experts_multiplies_with_the_routers_kernels() -> None:
    plugin = SonicMoETorch()
    names = ("nvjet_sm90_tst_128x64_64x8_1x2_h_bz_TNT", "nvjet_sm90_tst_128x64_64x8_1x2_h_bz_NTT", "gatherTopK")
    assert [plugin.kernel_role(name) for name in names] == ["router"] * 3
    plugin._loops = True
    assert [plugin.kernel_role(name) for name in names] == ["gemm", "dW", "router"]
