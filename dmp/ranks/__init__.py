"""What all ranks do, and fail, together; and how ranks that part ways are told.

Which to use, in a call that all ranks of a group make together:
    `entry`             around every such call: ranks in different ones are told, and do not wait for each other
    `fail_together`     a local step that may fail on one rank, before a collective that the others would wait in
    `results_of_all`    likewise, where every rank wants to know what each has made
    `numbers_of_all`    likewise for one number, in a single exchange
    `raise_on_all`      an error that one rank may have met alone, where the others wait in collectives of torch's
    `from_first`        what rank 0 alone makes
    `compare_facts`     what must be the same everywhere, as texts by name
    `gather_objects`    what may differ; `gather_words` for two integers, in a single exchange
    `own_group`         a group beside the program's, for one purpose; `control_group` for exchanges such as these
    `backend_of`        a group's backend, also where torch calls it undefined
    `is_alive`          whether the program has not destroyed a group
    `at_work`           around what takes long on one rank, such as compiling: it is not taken for one that waits
    `raise_cause`       in place of what torch says of a collective that broke
    `take_turn`         before a collective of torch's that ranks may begin in different orders
    `around_backward`   what is done around every backward pass
    `note_left`         of a pass that raises here alone; `begin_pass` where one begins
    `say_once`          what the user is told once; by all ranks, or by the first for all
    `parted_text`       what an error says where ranks are found in different calls
    `raise_verdict`     every so often in a wait that is no collective, and before one

In reading order:

- `call_log`: notes of the calls that ranks make together
- `entry`: a call that all ranks make together, and what is behind it when it breaks
- `groups`: process groups of our own
- `exchange`: words, objects and facts that all ranks tell each other
- `turns`: that all ranks begin the same of torch's collectives
- `failing`: local steps that fail on all ranks when they fail on one
- `watchdog`: a thread that sees when ranks part ways, or one is dead
- `answers`: where each rank says it is, and what that means
- `connections`: gloo's connections of this process, and an end to them
- `backward`: what is done around every backward pass of this process
- `left`: errors by which this rank alone may have left a pass
- `saying`: what a process tells its user once
- `stacks`: where a thread of this process is
- `launch`: the process group of a launch that made none
"""

from dmp.errors import RanksError
from dmp.ranks.answers import parted_text
from dmp.ranks.backward import around_backward
from dmp.ranks.connections import backend_of
from dmp.ranks.entry import at_work, calls_so_far, entry, raise_cause, raise_verdict
from dmp.ranks.exchange import compare_facts, gather_objects, gather_words
from dmp.ranks.failing import fail_together, from_first, numbers_of_all, raise_on_all, results_of_all
from dmp.ranks.groups import control_group, is_alive, own_group
from dmp.ranks.left import begin_pass, note_left
from dmp.ranks.saying import say_once
from dmp.ranks.turns import take_turn
from dmp.ranks.watchdog import PeerLost

__all__ = ["PeerLost", "RanksError", "at_work", "calls_so_far", "compare_facts", "control_group", "entry"]
__all__ += ["gather_objects", "gather_words", "numbers_of_all", "own_group", "raise_cause", "raise_on_all"]
__all__ += ["fail_together", "from_first", "parted_text", "raise_verdict", "results_of_all", "take_turn"]
__all__ += ["around_backward", "backend_of", "begin_pass", "is_alive", "note_left", "say_once"]
