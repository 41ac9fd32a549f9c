"""Environment variables by which a launcher introduces a process as a rank."""

from __future__ import annotations

import os

_OF_A_RANK = (
    *("PMI_", "PMI2_", "PMIX_", "HYDI_", "HYDRA_", "MPI_LOCAL", "OMPI_COMM_WORLD_", "OMPI_UNIVERSE_SIZE", "OMPI_FILE_"),
    *(
        "OMPI_FIRST_RANKS",
        "OMPI_APP_CTX",
        "OMPI_MCA_ess",
        "OMPI_MCA_orte",
        "OMPI_MCA_pmix",
        "OMPI_NUM_APP",
        "OMPI_ARGV",
    ),
    *("OMPI_COMMAND", "PRTE_LAUNCHED", "PRTE_MCA_ess", "PRTE_MCA_prte", "MV2_COMM_WORLD_", "MATEX_RANK_PROCESS"),
)


def without_rank() -> dict[str, str]:
    """Return the environment without what makes this process a rank; settings of the MPI library stay."""
    return {name: value for name, value in os.environ.items() if not name.startswith(_OF_A_RANK)}
