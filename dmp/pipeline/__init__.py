"""A training loop in which a batch is on its way while the one before it computes.

In reading order:

- `walk`: what a batch holds, and where: the same objects are found again by their paths
- `in_flight`: batches that were read ahead, and are on their way to the device
- `ahead`: calls of sharded modules that were begun for the next batch
- `pipeline`: `TrainPipeline`, a step of which is one batch
- `torchrec_names`: the same under the names and signatures that TorchRec's scripts use
"""
