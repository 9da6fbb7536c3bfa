"""Where the rectangles of a parameter lie: a layout is what a user wrote, and resolves for a shape and a mesh. In
reading order:

- `layout`: layouts and the rectangles they resolve to
- `cover`: whether rectangles cover a whole exactly once
"""
