"""Effects are the work that a run's facts call for: asking workers, moving states, reporting facts.
A fact is a journaled event; a party is the workers that train one model copy together; a segment is
the steps between two commits."""
