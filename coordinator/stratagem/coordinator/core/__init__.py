"""The core is the pure part of the coordinator: facts, state, commands, effects, and the contract
of strategies. Its terms are:

fact        a journaled event; the state is the fold of all facts
effect      work that a run needs done, as a value
party       the workers that train one copy of a model together, named by a path ("": the root)
membership  the number of a party's present set of members; every change increases it
segment     the steps between two commits; a commit is a stored state of the training
run value   a strategy's own state of a run, from which decisions and effects follow
"""
