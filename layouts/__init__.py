"""The layout explorer: CuTe layouts in plain Python, read from the kernels' own classes and drawn.

`layouts.algebra` evaluates layouts, swizzles and the layout algebra with numpy; `layouts.text` parses them in CuTe's
notation; the rest of the package turns a row of the dispatch tables into a scene (tiles, fragments, steps, budgets)
and the scene into pictures or one self-contained page. Nothing here needs a GPU, and no kernel imports this package.
"""
