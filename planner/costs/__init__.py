"""What a layout costs on a machine: `topology` is the machine, `cost_model` the seconds and bytes."""
