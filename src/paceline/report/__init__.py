"""Pages a browser shows from a file: charts and tables of a run, of several runs, of a study."""
