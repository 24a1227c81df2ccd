"""``hvd-twobit plan``: what ``hvd_twobit.cost_model`` predicts, as a table, as a chart, or beside measurements."""
