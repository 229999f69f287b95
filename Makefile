# SPDX-License-Identifier: Apache-2.0
# A thin front for meson. `make check` is what a change must pass; `make demo` shows the service at work.

BUILD ?= build
MESON ?= meson

.PHONY: build check check-slow demo bench deps clean

deps:
	@packaging/build-deps

build: deps
	@test -f $(BUILD)/build.ninja || $(MESON) setup $(BUILD) -Dtests=enabled
	@ninja -C $(BUILD)

check: deps
	@tests/check

check-slow: build
	@tests/check-slow

demo: build
	@tests/demo

bench: deps
	@packaging/build-deps --bench
	@test -f $(BUILD)-bench/build.ninja || $(MESON) setup $(BUILD)-bench --buildtype=release -Dtests=enabled -Dbench=enabled
	@ninja -C $(BUILD)-bench

clean:
	rm -rf $(BUILD) build-*
