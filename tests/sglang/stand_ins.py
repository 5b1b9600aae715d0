"""Lets SGLang's cache be imported and run on a machine without a GPU.

Packages that only a GPU needs become modules that accept anything; the CUDA copy becomes a plain
copy of torch, and host memory is not pinned. Nothing that decides is touched.
"""

# pyright: basic, reportMissingImports=false, reportIncompatibleMethodOverride=false

from __future__ import annotations

import importlib.abc
import importlib.machinery
import os
import sys
import types

MISSING = {
    "triton", "transformers", "sgl_kernel", "flashinfer", "starlette", "tvm_ffi",
    "huggingface_hub", "torchvision", "safetensors", "sentencepiece", "IPython",
}  # fmt: skip
# Packages whose __init__ is skipped, and modules that are left out whole.
HOLLOW = ("configs", "layers.quantization", "layers.moe", "utils.hf_transformers")
ABSENT = ("hf_transformers_utils", "hf_transformers.config", "hf_transformers.common")


class _Base:
    def __init_subclass__(cls, **_: object) -> None:
        pass


class _Anything:
    """Can be called, subscripted, decorated with, derived from."""

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def __call__(self, *args, **how):
        is_decorator = len(args) == 1 and callable(args[0]) and not how
        return args[0] if is_decorator else _Anything()

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything()

    def __getitem__(self, _):
        return _Anything()

    def __mro_entries__(self, _):
        return (_Base,)

    def __or__(self, _):
        return object

    __ror__ = __or__

    def __iter__(self):
        return iter(())

    def __contains__(self, _):
        return False

    def __lt__(self, _):
        return False

    __gt__ = __lt__


class _Hollow(types.ModuleType):
    __path__ = ()
    __version__ = "9.9.9"
    __all__ = ()

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return sys.modules.get(f"{self.__name__}.{name}") or _Anything()


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path, target=None):
        if name.partition(".")[0] in MISSING:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        return _Hollow(spec.name)

    def exec_module(self, module):
        pass


def install(root: str) -> None:
    """Make ``sglang`` under ``root`` (the unpacked wheel) importable."""
    sys.meta_path.append(_Finder())  # last: what is installed wins
    sys.path.insert(0, root)  # its .dist-info tells the version
    package = types.ModuleType("sglang")
    package.__path__ = [f"{root}/sglang"]
    sys.modules["sglang"] = package  # its own __init__ needs the model packages
    for name in ABSENT:
        sys.modules[f"sglang.srt.utils.{name}"] = _Hollow(f"sglang.srt.utils.{name}")
    for name in HOLLOW:
        module = _Hollow(f"sglang.srt.{name}")
        module.__path__ = [f"{root}/sglang/srt/{name.replace('.', '/')}"]
        sys.modules[module.__name__] = module
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    _copy_on_cpu()


def _copy_on_cpu() -> None:
    import sglang.srt.mem_cache.hybrid_cache.hybrid_pool_assembler as assembler
    import sglang.srt.mem_cache.pool_host.mha as mha

    def copy(*, src_layers, dst_layers, src_indices, dst_indices, page_size) -> None:
        for source, target in zip(src_layers, dst_layers, strict=True):
            target[dst_indices] = source[src_indices]

    mha.transfer_kv_direct = copy
    pool_class = assembler.get_mha_host_pool_cls

    def unpinned(info):
        made = pool_class(info)
        return lambda *args, **how: made(*args, **{**how, "pin_memory": False})

    assembler.get_mha_host_pool_cls = unpinned
