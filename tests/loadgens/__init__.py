"""Load generators that others wrote, through lbproxy: what they report, beside what lbproxy reports of the same run."""
