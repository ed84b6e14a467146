"""HTML pages with charts and tables of a run, of several runs, or of a study."""
