"""What a layout costs on a machine. In reading order:

- `topology`: how fast and large the machine is
- `cost_model`: seconds by phase and bytes of every option
"""
