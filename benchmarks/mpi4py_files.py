"""The test files of mpi4py that benchmarks/mpi4py_tests.py runs, and why some of their tests do not pass."""

from __future__ import annotations

MUST = (
    "test_p2p_buf",
    "test_p2p_obj",
    "test_cco_buf",
    "test_cco_obj",
    "test_cco_vec",
    "test_cco_nb_buf",
    "test_group",
    "test_op",
    "test_status",
    "test_request",
    "test_comm",
)
"""At least 90% of the tests that run must pass."""
MUST_LIKE_REAL = (
    "test_comm_topo",
    "test_cco_ngh_buf",
    "test_cco_ngh_obj",
    "test_cco_pr_buf",
    "test_cco_pr_ngh_buf",
    "test_cco_pr_vec",
    "test_attributes",
    "test_buffer",
    "test_rma",
    "test_rma_nb",
    "test_win",
    "test_pack",
    "test_datatype",
    "test_p2p_buf_matched",
    "test_p2p_obj_matched",
    "test_p2p_buf_part",
)
"""With --compare, at least 95% of the tests that mpi4py itself passes must pass."""
OTHERS = (
    "test_address",
    "test_cco_nb_vec",
    "test_environ",
    "test_errhandler",
    "test_errorcode",
    "test_exceptions",
    "test_grequest",
    "test_handle",
    "test_info",
    "test_mpimem",
    "test_msgspec",
    "test_msgzero",
    "test_objmodel",
    "test_pickle",
    "test_subclass",
    "test_threads",
)

_CUDA = "pretends that host memory is a GPU's; here torch reads GPU memory, and has none"
_ODD = "not asked for: descriptions of memory that contradict themselves get other errors, or none"
REASONS = {
    "test_errhandler.TestErrhandlerFile": "not asked for: MPI-IO",
    "test_errhandler.TestErrhandlerSession": "not asked for: sessions",
    "test_errhandler.": "not asked for: error handlers made by programs; errors are always raised",
    "test_errorcode.": "not asked for: error codes that programs add",
    "test_exceptions.": "not asked for: the file needs sessions to load",
    "test_grequest.": "not asked for: generalized requests",
    "test_handle.TestHandleFile": "not asked for: MPI-IO",
    "test_handle.TestHandleSession": "not asked for: sessions",
    "test_info.": "not asked for: Info is a mapping here, so keys() is a view, and null ones can be updated by nothing",
    "test_msgspec.TestMessageSimpleDLPackGPUBuf": _CUDA,
    "test_msgspec.TestMessageCAIBuf": _ODD,
    "test_msgspec.TestMessageDLPackCPUBuf": _ODD,
    "test_msgspec.": "not asked for: MPI.buffer is a numpy array here",
    "test_objmodel.": "not asked for: mpi4py's internals, sessions and MPI-IO",
    "test_subclass.": "not asked for: the file needs MPI-IO to load",
}
"""Why a test does not pass, by the beginning of `file.class.method`; the first that fits."""
