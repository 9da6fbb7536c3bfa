"""From a plain module to a wrapped one, and the wrapped one itself. In reading order:

- `wrapper`: `DistributedModelParallel`, the wrapped model as a module
- `forward`: `model.forward`, with the signature of the module's own
- `grad_sync`: averages of dense gradients, left out while they accumulate
- `stand_ins`: watches over optimizers and errors, put in torch's place
- `torchrec_members`: what scripts ask of TorchRec's wrapper beside our contract
- `delta_tracker`: which rows of tables were trained since they were last asked for
- `outer_wrappers`: DistributedDataParallel around wrapped models: it leaves them alone
"""
