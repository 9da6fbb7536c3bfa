"""The commands of `python -m dmp`, one to a file: `NAME`, `ABOUT`, `add(parser)` and `run(given)`. In reading order:

- `refusal`: what is wrong with a command line, in one line and an exit code
- `factory`: the user's module, loader or class, imported by name
- `machine`: the mesh and the machine that a command line describes
- `files`: plans, and what lies beside them, from disk and to it
- `plan`: a plan for a mesh that is not here
- `explain`: why a parameter has its layout
- `diff`: what differs between two plans
- `propose`: which mesh a model would do best on
- `calibrate`: this machine's figures, measured
- `installed`: which installed packages fit each other
- `doctor`: whether what is installed fits, and can be imported
- `convert`: a checkpoint of one kind into one of another
"""
