"""Tokens per second of a transformers model with random weights (110 million parameters), tensor-parallel over the ranks.

    convoke --standalone --nproc-per-node=2 tensor_parallel.py gloo|convoke

Needs transformers and convoke-dist. Rank 0 prints the rate and a checksum of the tokens.
"""

import sys
import time

import torch
import torch.distributed as dist
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import LlamaConfig, LlamaForCausalLM

TOKENS = 48
COLUMNS = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"]
ROWS = ["self_attn.o_proj", "mlp.down_proj"]

torch.set_num_threads(1)
dist.init_process_group(sys.argv[1])
torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=16000, hidden_size=768, intermediate_size=2048, num_hidden_layers=12, num_attention_heads=12, num_key_value_heads=12
)
model = LlamaForCausalLM(config).eval()
mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
plan = {name: ColwiseParallel() for name in COLUMNS} | {name: RowwiseParallel() for name in ROWS}
for layer in model.model.layers:
    parallelize_module(layer, mesh, plan)
prompt = torch.arange(8).reshape(1, 8)
with torch.inference_mode():
    model.generate(prompt, max_new_tokens=4, do_sample=False)
    began = time.perf_counter()
    tokens = model.generate(prompt, max_new_tokens=TOKENS, do_sample=False)
    took = time.perf_counter() - began
if dist.get_rank() == 0:
    print(f"{sys.argv[1]}: {TOKENS / took:.1f} tokens/s, checksum {tokens.sum().item()}")
dist.destroy_process_group()
