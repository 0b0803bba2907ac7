"""What engines report: metrics pages, load reports in headers, the pages on which they describe themselves.

Text in, `LoadMetrics` out. `dialects` has one table for each engine, built in or from the settings: a new engine is a
new table. A page is never trusted: bounded, and what cannot be read is None rather than 0.

In: the scraper, the prober, `lbproxy check`. Never: what the numbers are worth, or when they were too old.
"""
