"""A table's weight as programs read, draw and write it: right on parts, or refused. In reading order:

- `unread_weight`: a table's parameter inside the forward: asked for its shape, never read
- `part_read`: a table's part that the model's methods read past its forward, never taken for the whole
- `asked_of`: what code asks of a weight that it reads
- `operations`: torch's operations by their names
- `handed_out`: parameters of tables as users hold them: terms of a loss, new values
- `drawn_later`: what `torch.nn.init` draws in a table that is on a mesh
- `same_form`: a table's weight is not parametrized, pruned or normed on its parts
- `loss_terms`: terms of the loss over tables' own values, right on parts or refused
- `seen_part`: a part, or its gradient, outside the model: says so where one number is made of it, or a row by number
- `among`: ranks that average what each reads of a table past its lookup
"""
