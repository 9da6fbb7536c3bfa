"""A Hugging Face Llama on a mesh, by the plans that it brings, and back: no download, no change to the model.

Its `tp_plan` says how layers are split over `tp`, its `fsdp_plan` what is gathered at once over `shard`. Run it with
    torchrun --nproc_per_node=4 examples/hf_llama.py --mesh 2x2 --axes shard,tp
or, in one process, with plain python.
"""

from __future__ import annotations

from pathlib import Path

import torch
from command_line import Parser, mesh_shape, names, positive
from launch import fail, is_first, leave, make_env, say
from transformers import LlamaConfig, LlamaForCausalLM

from dmp import DistributedModelParallel, clip_grad_norm_, to_unsharded

TEXT = Path(__file__).read_bytes()
PROMPT = b"from __future__ "
CONFIG = LlamaConfig(
    vocab_size=256,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
)


def main() -> None:
    parser = Parser("Trains a tiny Hugging Face Llama on the bytes of this file, on any mesh.", "")
    options = parser.options("options")
    options("--mesh", "shape of the device mesh (default: all processes in one axis)", metavar="NxM", type=mesh_shape)
    options("--axes", "its axis names, of dp, replicate, shard, tp", metavar="NAMES", type=names)
    options("--device", "processor", choices=("cpu", "cuda"), default="cpu")
    options("--steps", "of training", metavar="N", type=positive, default=60)
    options("--save", "write it as save_pretrained does", metavar="DIR")
    args = parser.parse_args()
    env = make_env(args.mesh, args.axes, args.device)

    torch.manual_seed(0)
    with torch.device("meta"):
        llama = LlamaForCausalLM(CONFIG)
    model = DistributedModelParallel(llama, env)  # filled as its own `_init_weights` does
    say(f"{env}\n{model.plan}")

    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    group = env.group("replicate", "shard")  # data ranks: their samples differ
    random = torch.Generator().manual_seed(0 if group is None else group.rank())
    text = torch.frombuffer(bytearray(TEXT), dtype=torch.uint8).long()
    for step in range(1, args.steps + 1):
        starts = torch.randint(len(text) - 64, (8, 1), generator=random)
        ids = text[starts + torch.arange(64)].to(env.device)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 0 or step == 1:
            say(f"step {step}: loss {loss.item():.4f}")

    plain = to_unsharded(model)  # on every rank: a LlamaForCausalLM like any other
    if is_first():
        prompt = torch.tensor([list(PROMPT)])
        written = plain.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=32, do_sample=False)
        say(f"{type(plain).__name__} writes: {bytes(written[0].tolist())!r}")
        if args.save:
            plain.save_pretrained(args.save)
            say(f"saved {args.save}")


if __name__ == "__main__":
    try:
        main()
    except (ValueError, OSError) as error:
        fail(str(error))
    finally:
        leave()
