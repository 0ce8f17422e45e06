"""Training strategies: one file each, no inheritance, and one door for all of them.

A strategy is a module (or any object) with the functions of ``contract.Strategy``, registered in
the entry-point group ``stratagem.strategies`` under the ``type`` of its JSON form. The built-in
ones come in by the same door. Nothing here awaits, reads a clock or touches a tensor.
"""
