import torch, copy, sys
from tests.ranks import run_ranks, mesh
from tests.test_tensor_parallel import *
import sharders.tensor_parallel as T, sharders.tp_hooks as H
def go(shape,names,comp,stock):
    model=build("llama"); ref=copy.deepcopy(model)
    model.layers=model.layers[:1]; ref.layers=ref.layers[:1]
    where=mesh(shape,names)
    if stock:
        T.keep_leftovers=lambda *a: None; H.share_inputs=lambda *a: None
    TensorParallelSharder({"layers.*.attention.w[qkv]":"colwise","layers.*.attention.wo":"rowwise"}).place(model,{},ShardingEnv.from_mesh(where)).apply(model)
    for b in blocks_of(model): b.compile(backend=comp)
    for b in blocks_of(model): fully_shard(b, mesh=where["shard"])
    fully_shard(model, mesh=where["shard"])
    ids=batches()[0]
    out=model(ids); loss_of(out,ids).backward()
    e=ref(ids); loss_of(e,ids).backward()
    return {n:(None if p.grad is None else float((whole(p.grad)-q.grad).abs().max())) for (n,p),q in zip(model.named_parameters(),ref.parameters()) if p.grad is None or (whole(p.grad)-q.grad).abs().max()>1e-9}
if __name__=="__main__":
    for stock in (True, False):
        try: print("stock" if stock else "ours",run_ranks(2,go,(1,2),("shard","tp"),"aot_eager",stock)[0],flush=True)
        except Exception as e: print(stock,str(e)[:200], str(e)[-600:],flush=True)
