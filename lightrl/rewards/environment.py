"""The environment variables of a reward worker: those that programs need to run, no secrets.

An allow list, since names of secrets are not known; `reward.env` adds to it.
"""

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase

USUAL = (
    *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "PWD", "TMPDIR", "TEMP", "TMP", "XDG_*"),
    *("LANG", "LANGUAGE", "LC_*", "TZ", "TERM"),
    *("PYTHON*", "VIRTUAL_ENV", "CONDA_PREFIX", "CONDA_DEFAULT_ENV", "LOCALE_ARCHIVE", "NIX_LD*"),
    *("LD_LIBRARY_PATH", "LD_PRELOAD", "DYLD_*", "CC", "CXX", "JAVA_HOME"),
    *("NLTK_DATA", "MPLCONFIGDIR", "HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "HF_ENDPOINT"),
    *("OMP_*", "MKL_*", "OPENBLAS_*", "NUMEXPR_*", "NUMBA_*", "KMP_*", "MALLOC_*", "TOKENIZERS_*"),
    *("CUDA_*", "NVIDIA_*", "ROCR_*", "HIP_*", "HSA_*", "TORCH_*", "TORCHINDUCTOR_*", "TRITON_*"),
    *("HF_DATASETS_*", "TRANSFORMERS_*"),
    *("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY"),  # also in lower case
    *("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"),
)
NEVER = "LIGHTRL_*"  # the key of the run


def inherited(environment: Mapping[str, str], more: Iterable[str]) -> dict[str, str]:
    """The variables of `environment` that match USUAL or one of the patterns in `more`.

    Example: inherited({"PATH": "/bin", "HF_TOKEN": "x"}, ()) is {"PATH": "/bin"}.
    """
    patterns = (*USUAL, *more)
    return {
        name: value
        for name, value in environment.items()
        if any(_matches(name, pattern) for pattern in patterns) and not fnmatchcase(name, NEVER)
    }


def _matches(name: str, pattern: str) -> bool:
    return fnmatchcase(name, pattern) or (
        name.endswith("_proxy") and fnmatchcase(name.upper(), pattern)
    )
