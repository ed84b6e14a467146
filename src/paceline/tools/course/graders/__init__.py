"""One file per lesson: what its check looks at, in order, and what each wrong value tells about its cause."""
