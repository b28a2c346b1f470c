"""What is used of torch without a promise of torch's is there, in the torch that runs the tests.

``scripts/compatibility.py`` runs this under other versions; a failure says what they lack.
"""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from pkgutil import resolve_name
from types import CodeType

import pytest
import torch
from torch import distributed

from ncclops import restart
from ncclops.restart._groups.tables import TABLES
from ncclops.restart.store_server import load_tcp_store
from ncclops.versions import satisfies

C10D = "torch.distributed.distributed_c10d"
EXTENSION = "torch._C._distributed_c10d"
ITERATOR = "torch.utils.data.dataloader._MultiProcessingDataLoaderIter"
NCCL = "torch.distributed.ProcessGroupNCCL"
# How the sources write a private name of these modules.
MODULES = {"torch": "torch", "distributed": "torch.distributed", "distributed_c10d": C10D}
PRIVATE = re.compile(rf"(?<![\w.])({'|'.join(MODULES)})((?:\.\w+)*\._[a-zA-Z]\w*(?:\.\w+)*)")

# What is used where this torch has it, and a version that does.
NEWER = {
    "torch.distributed.checkpoint._async_process_executor": "2.13",
    f"{C10D}._use_torchcomms_enabled": "2.13",
    f"{C10D}._reconfigure": "2.14",
    f"{C10D}._get_reconfigure_handle": "2.14",
    f"{C10D}.Backend._ensure_backend_registered": "2.15",
    f"{C10D}._create_nccl2_process_group": "2.15",
}
# What is used of objects or classes, or has several names, the newest first.
ANY_OF = [
    ("_groups/backends.py", "torch.distributed.ProcessGroup", ["_get_backend"]),
    ("_groups/backends.py", "torch.distributed.ProcessGroup", ["_device_types"]),
    ("_groups/open_operations.py", "torch.distributed.ProcessGroup", ["_start_coalescing"]),
    ("_groups/open_operations.py", "torch.distributed.ProcessGroup", ["_end_coalescing"]),
    ("_groups/open_operations.py", NCCL, ["_group_end"]),
    ("_groups/backends.py", f"{EXTENSION}._ProcessGroupWrapper", ["wrapped_pg"]),
    ("_groups/tables.py", EXTENSION, ["_unregister_all_process_groups"]),
    ("_groups/aborting.py", NCCL, ["abort", "_abort", "_shutdown"]),
    ("_groups/ending.py", NCCL, ["shutdown", "_shutdown"]),
    ("flight_recorders.py", EXTENSION, ["_dump_fr_trace", "_dump_nccl_trace"]),
    ("store_server.py", "torch._C", ["_c10d_init"]),
    ("_interrupt/delicate.py", ITERATOR, ["_reset"]),
    ("_interrupt/delicate.py", ITERATOR, ["_next_data"]),
    ("_data_loaders.py", ITERATOR, ["_shutdown_workers"]),
    ("_data_loaders.py", "torch.utils.data._utils.signal_handling", ["_remove_worker_pids"]),
    ("worker/group_timeouts.py", C10D, ["set_timeout", "_set_pg_timeout"]),
]
# What is used of a function's variables, or is set on an object by it.
IN_CODE = [
    ("_groups/backends.py", f"{C10D}._new_process_group_helper", "backend_class"),
    ("_groups/backends.py", f"{C10D}._new_process_group_helper", "eager_backend"),
    ("_groups/tables.py", f"{C10D}.init_process_group", "_distributed_excepthook"),
    ("_groups/tables.py", f"{C10D}.init_process_group", "old_hook"),
    *(
        ("_data_loaders.py", f"{ITERATOR}.__init__", name)
        for name in (
            *("_workers", "_workers_done_event", "_index_queues", "_data_queue"),
            *("_shutdown", "_worker_pids_set"),
        )
    ),
]


def private_names() -> list[tuple[str, str]]:
    """Those in the restart core, each with the file that uses it."""
    found = {
        MODULES[module] + attributes: path.name
        for path in sorted(Path(restart.__path__[0]).rglob("*.py"))
        for module, attributes in PRIVATE.findall(path.read_text())
    }
    return sorted(found.items())


def there(name: str) -> bool:
    try:
        resolve_name(name)
    except (AttributeError, ImportError):
        return False
    return True


def names_in(code: CodeType) -> set[str]:
    inner = [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    own = {code.co_name, *code.co_names, *code.co_varnames, *code.co_freevars, *code.co_cellvars}
    return own.union(*map(names_in, inner))


@pytest.mark.parametrize(("name", "file"), private_names())
def test_a_private_name_of_torch_is_there(name: str, file: str) -> None:
    if name in NEWER and not satisfies(torch.__version__, f">={NEWER[name]}"):
        pytest.skip(f"torch {NEWER[name]} has it")
    assert there(name), f"torch {torch.__version__} has no {name}, which {file} uses"


@pytest.mark.parametrize(("file", "owner", "names"), ANY_OF)
def test_one_of_several_names_is_there(file: str, owner: str, names: list[str]) -> None:
    if "nccl" in (owner + names[-1]).lower() and not distributed.is_nccl_available():
        pytest.skip("a build without NCCL")
    found = [name for name in names if there(f"{owner}.{name}")]
    assert found, f"torch {torch.__version__}: {owner} has no {names}, which {file} uses"


@pytest.mark.parametrize(("file", "function", "name"), IN_CODE)
def test_a_name_in_the_code_of_torch_is_there(file: str, function: str, name: str) -> None:
    code: CodeType = inspect.unwrap(resolve_name(function)).__code__
    assert name in names_in(code), f"torch {torch.__version__}: no {name}, which {file} uses"


def test_env_is_a_way_to_make_groups() -> None:
    handlers = resolve_name("torch.distributed.rendezvous:_rendezvous_handlers")
    assert "env" in handlers


def test_all_of_torchs_tables_of_groups_are_emptied() -> None:
    """A table that a newer torch has added would keep each group of the iterations before."""
    emptied = names_in(inspect.unwrap(distributed.destroy_process_group).__code__)
    tables = emptied & set(vars(resolve_name(f"{C10D}._World"))) - {"default_pg", "group_count"}
    assert {"pg_map", "pg_names", "tags_to_pg"} <= tables
    missing = tables - set(TABLES)
    assert not missing, f"torch {torch.__version__} empties {missing}, and we do not"


def test_the_store_of_a_process_that_has_imported_torch_is_torch_s() -> None:
    """By a sitecustomize, say. The extension alone, a second time, would abort the process."""
    assert load_tcp_store.__wrapped__() is distributed.TCPStore
