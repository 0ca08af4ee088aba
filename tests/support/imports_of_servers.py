"""The imports of a server on a CPU.

server_forkserver.py imports this module once, in the process that forks the servers.
"""

import gc

import setproctitle
import sglang.srt.entrypoints.http_server
import sglang.srt.managers.data_parallel_controller
import sglang.srt.managers.detokenizer_manager
import sglang.srt.managers.scheduler
import sglang.srt.models.registry  # noqa: F401  (imports every model)

# Not the table of hooks (srt/plugin): a server imports it after server_plugin.py has replaced functions in it.
import dsv4_sglang.srt.attention.backend
import dsv4_sglang.srt.host_cache.storage  # noqa: F401

# The title's memory is found through the environment of the process start, which a forked process changes.
setproctitle.getproctitle()
# A garbage collection would copy the memory that the servers share.
gc.freeze()
