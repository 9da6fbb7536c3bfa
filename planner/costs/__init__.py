"""What a layout costs on a machine. In reading order:

- `speeds`: what the parts of the data path take on a device
- `topology`: how fast and large the machine is
- `topology_file`: the files that topologies are kept in
- `protocol`: what a cost model is asked and answers, ours or a user's
- `links`: seconds of exchanges on the links of a mesh
- `rings`: seconds of gathers and sums whose ranks on a host share their way out of it
- `copies`: how gradients of a plan's copied tables travel
- `cost_model`: ours: seconds by phase and bytes of every option
- `step`: what a step of given layouts costs
- `calibrate`: a machine's figures, measured
- `measure`: what calibration measures, and of which tables
- `local_ranks`: the processes that measure
- `fit`: from measurements to figures
"""
