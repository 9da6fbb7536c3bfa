"""What no sharder owns: replicated (`ddp`) or fully sharded (`fsdp`, by the units that `blocks` finds)."""
