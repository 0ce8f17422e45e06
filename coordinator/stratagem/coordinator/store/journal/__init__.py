"""The durable event log of the coordinator, and the lease that says who may write it.

    journal.py   the log: append, read
    summaries.py what is kept of a run beside its events, so that they need not be read
    lead.py      how the lead is taken, kept and lost
    lead_holder.py    who holds the lease, and whether that process still lives
    database.py  transactions, and a database that may go away; sqlite.py and postgres.py have each
    tables.py    the tables; schema.py and migrations/ bring older ones to them

Knows events as rows of text. What they mean is `core/facts`.
"""
