"""What a server on a CPU imports: server_forkserver.py has it imported once, in the process of which servers are
forked."""

import gc

import setproctitle
import sglang.srt.entrypoints.http_server
import sglang.srt.managers.data_parallel_controller
import sglang.srt.managers.detokenizer_manager
import sglang.srt.managers.scheduler
import sglang.srt.models.registry  # noqa: F401  (imports every model)

# It finds a title's place by the environment that the process got, and a forked one changes its own.
setproctitle.getproctitle()
# A collection would copy memory that the servers share.
gc.freeze()
