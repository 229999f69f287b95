# SPDX-License-Identifier: Apache-2.0
# A thin front for meson. `make check` is what a change must pass; `make demo` shows the service at work, `make demo PROMPT="..."` makes a film.

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

# PROMPT="..." makes a film of it, demo.mp4; IMAGE=FILE is its first picture.
# Without a build it makes one of its own that leaves out the tests and the CUDA kernels, which take nvcc minutes.
DEMO_BUILD := $(if $(wildcard $(BUILD)/build.ninja),$(BUILD),build-demo)
demo: deps
	@test -f $(DEMO_BUILD)/build.ninja || $(MESON) setup $(DEMO_BUILD) -Dtests=disabled -Dcuda=disabled
	@ninja -C $(DEMO_BUILD)
ifeq ($(origin PROMPT),command line)
	@LATENT_BUILD_DIR=$(DEMO_BUILD) tests/demo-film "$$PROMPT" $(if $(IMAGE),--image "$$IMAGE")
else
	@LATENT_BUILD_DIR=$(DEMO_BUILD) tests/demo
endif

bench: deps
	@packaging/build-deps --bench
	@test -f $(BUILD)-bench/build.ninja || $(MESON) setup $(BUILD)-bench --buildtype=release -Dtests=enabled -Dbench=enabled
	@ninja -C $(BUILD)-bench

clean:
	rm -rf $(BUILD) build-*
