"""A channel through memory that the processes of one host share.

In reading order:

- `mapping`: anonymous memory that several processes map
- `segment`: what one rank writes and the others read: counters, descriptions of exchanges, blocks of data
- `cores`: how many this process has
- `waiting`: a wait for another process, by futex, which ends when that process does
- `landing`: memory that others write an answer in
- `transfer`: an exchange that is under way
- `memory_channel`: the exchanges
- `opening`: which ranks share a host, and whether they can share memory
"""
