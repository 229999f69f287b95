/* SPDX-License-Identifier: Apache-2.0 */
/* The worker program: a JOB_OPEN that is wrong is refused by name, and nothing is written. */

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "service/shared/cleanup.h"
#include "tests/unit/worker/broker.h"

#define ARENA (1 << 16)

/* What may be wrong with a JOB_OPEN, one change at a time. */
typedef struct Wrong {
        const char *what;
        void (*change)(WireJobOpen *j, Arenas *a);
        const char *fault, *part;
} Wrong;

static void set_f32(Arenas *a, const WireTensor *t, uint64_t i, float v) {
        memcpy(a->input + t->offset + i * 4, &v, sizeof(v));
}

static void set_u16(Arenas *a, const WireTensor *t, uint64_t i, uint16_t v) {
        memcpy(a->input + t->offset + i * 2, &v, sizeof(v));
}

/* Below the request's own tensors: zeros at first. */
#define MASK_AT 8192
#define CLEAN_AT 12288
#define TENSORS_AT 16384

static void set_place(Arenas *a, uint64_t offset, float v) {
        memcpy(a->input + offset, &v, sizeof(v));
}

static WireTensor slot_of(uint64_t n) {
        return (WireTensor){.size = n, .dtype = ST_U8, .n_dims = 1, .shape = {n}};
}

static WireTensor mask(uint32_t n_dims, uint64_t x, uint64_t y, uint64_t z) {
        return (WireTensor){.offset = MASK_AT,
                .size = 4 * x * (n_dims > 1 ? y : 1) * (n_dims > 2 ? z : 1),
                .dtype = ST_F32,
                .n_dims = n_dims,
                .shape = {x, y, z}};
}

#define CHANGE(name, ...)                                                                                   \
        static void name(WireJobOpen *j, Arenas *a) {                                                       \
                (void) a;                                                                                   \
                __VA_ARGS__;                                                                                \
        }

CHANGE(kind, j->kind = _WIRE_JOB_KIND_MAX)
CHANGE(coding, j->kind = WIRE_JOB_ENCODE)
CHANGE(compute, j->compute = 3)
CHANGE(flags, j->flags = 1u << 4)
CHANGE(keep_of_step, j->kind = WIRE_JOB_STEP; j->flags = WIRE_JOB_KEEP_STEPS)
CHANGE(sampler, j->sampler = 3)
CHANGE(schedule, j->schedule = 3)
CHANGE(steps_and_sigmas, j->steps = 4)
CHANGE(no_steps, j->schedule = WIRE_SCHEDULE_SIMPLE; j->shift_video = 12; j->shift_audio = 3)
CHANGE(many_steps, j->schedule = WIRE_SCHEDULE_SIMPLE; j->steps = 1001; j->shift_video = 12;
        j->shift_audio = 3)
CHANGE(nan_shift, j->schedule = WIRE_SCHEDULE_SIMPLE; j->steps = 4; j->shift_video = NAN; j->shift_audio = 3)
CHANGE(negative_shift, j->schedule = WIRE_SCHEDULE_REFERENCE; j->steps = 4; j->shift_video = 12;
        j->shift_audio = -3)
CHANGE(model, j->model = 99)
CHANGE(session, j->session = 99)
CHANGE(step_sigma_large, j->kind = WIRE_JOB_STEP; j->sigma_video = 1.0001f)
CHANGE(step_sigma_nan, j->kind = WIRE_JOB_STEP; j->sigma_audio = NAN)
CHANGE(video_nan, set_f32(a, &j->video, 33, NAN))
CHANGE(audio_inf, set_f32(a, &j->audio, 0, -INFINITY))
CHANGE(text_nan, set_u16(a, &j->text, 161, 0x7fc0))
CHANGE(text_inf, set_u16(a, &j->text, 1439, 0xff80))
CHANGE(tag_2, a->input[j->text_tags.offset + 8] = 2)
CHANGE(video_type, j->video.dtype = ST_BF16)
CHANGE(text_type, j->text.dtype = 4711)
CHANGE(video_dims, j->video.n_dims = 5; j->video.shape[4] = 1)
CHANGE(audio_no_dims, j->audio.n_dims = 0)
CHANGE(audio_many_dims, j->audio.n_dims = UINT32_MAX)
CHANGE(video_channels, j->video.shape[0] = 16; j->video.shape[1] = 3)
CHANGE(audio_channels, j->audio.shape[0] = 64; j->audio.shape[1] = 1)
CHANGE(video_zero, j->video.shape[1] = 0; j->video.size = 0)
CHANGE(video_overflow, j->video.shape[1] = UINT64_MAX / 2; j->video.shape[2] = 3)
CHANGE(video_size_overflow, j->video.shape[1] = (UINT64_MAX / 24 / 16) - 1)
CHANGE(text_dim, j->text.shape[0] = 10; j->text.shape[1] = 144)
CHANGE(tags_length, j->text_tags.shape[0] = 8; j->text_tags.size = 8)
CHANGE(video_size, j->video.size -= 4)
CHANGE(video_offset, j->video.offset = a->input_size - j->video.size + 1)
CHANGE(audio_offset_overflow, j->audio.offset = UINT64_MAX - 15)
CHANGE(text_offset_far, j->text.offset = (uint64_t) 1 << 40)
CHANGE(sigmas_unequal, j->sigmas_audio.shape[0] = 4; j->sigmas_audio.size = 16)
CHANGE(sigmas_one, j->sigmas_video.shape[0] = j->sigmas_audio.shape[0] = 1;
        j->sigmas_video.size = j->sigmas_audio.size = 4)
CHANGE(sigmas_ascending, set_f32(a, &j->sigmas_video, 1, 1.0f))
CHANGE(sigmas_nan, set_f32(a, &j->sigmas_audio, 2, NAN))
CHANGE(sigmas_large, set_f32(a, &j->sigmas_audio, 0, 2.0f))
CHANGE(sigmas_many, j->sigmas_video.shape[0] = 1002; j->sigmas_video.size = 4008; j->sigmas_video.offset = 0)
CHANGE(announced_one_stream, j->kind = WIRE_JOB_STEP; j->sigmas_video = (WireTensor){})
CHANGE(announced_unequal, j->kind = WIRE_JOB_STEP; j->sigmas_video.shape[0] = 4; j->sigmas_video.size = 16)
CHANGE(announced_ascending, j->kind = WIRE_JOB_STEP; set_f32(a, &j->sigmas_audio, 3, 0.999f))
CHANGE(announced_large, j->kind = WIRE_JOB_STEP; set_f32(a, &j->sigmas_video, 0, 1.0001f))
CHANGE(announced_type, j->kind = WIRE_JOB_STEP; j->sigmas_audio.dtype = ST_I32)
CHANGE(announced_outside, j->kind = WIRE_JOB_STEP; j->sigmas_audio.offset = a->input_size - 19)
CHANGE(output_odd, j->output_offset = 8; j->output_size -= 8)
CHANGE(output_outside, j->output_offset = 64)
CHANGE(output_overflow, j->output_offset = UINT64_MAX - 63)
CHANGE(output_small, j->output_size = 64 + 2 * (3072 + 2048) - 1)
CHANGE(output_small_keep, j->output_size = 64 + 5 * (3072 + 2048) - 1; j->flags = WIRE_JOB_KEEP_STEPS)

static const Wrong wrong[] = {
        {"kind", kind, FAULT_INVALID_ARGUMENT, "unknown kind 7"},
        {"coding", coding, FAULT_INVALID_ARGUMENT, "it needs a conditioner"},
        {"compute", compute, FAULT_INVALID_ARGUMENT, "unknown compute type 3"},
        {"flags", flags, FAULT_INVALID_ARGUMENT, "flags 0x10"},
        {"keep of a step", keep_of_step, FAULT_INVALID_ARGUMENT, "flags 0x1"},
        {"sampler", sampler, FAULT_INVALID_ARGUMENT, "unknown sampler 3"},
        {"schedule", schedule, FAULT_INVALID_ARGUMENT, "unknown schedule 3"},
        {"steps and sigmas", steps_and_sigmas, FAULT_INVALID_ARGUMENT, "give one of them"},
        {"no steps", no_steps, FAULT_INVALID_ARGUMENT, "0 steps, expected 1 to 1000"},
        {"many steps", many_steps, FAULT_INVALID_ARGUMENT, "1001 steps, expected 1 to 1000"},
        {"nan shift", nan_shift, FAULT_INVALID_ARGUMENT, ""},
        {"negative shift", negative_shift, FAULT_INVALID_ARGUMENT, ""},
        {"model", model, FAULT_INTERNAL, "model 99"},
        {"session", session, FAULT_INTERNAL, "session 99"},
        {"step sigma large", step_sigma_large, FAULT_INVALID_ARGUMENT, "expected 0 to 1"},
        {"step sigma nan", step_sigma_nan, FAULT_INVALID_ARGUMENT, "nan (audio)"},
        {"video nan", video_nan, FAULT_INVALID_TENSOR, "video has NaN at [1, 0, 0, 1]"},
        {"audio inf", audio_inf, FAULT_INVALID_TENSOR, "audio has Inf at [0, 0, 0]"},
        {"text nan", text_nan, FAULT_INVALID_TENSOR, "text has NaN at [1, 1]"},
        {"text inf", text_inf, FAULT_INVALID_TENSOR, "text has Inf at [8, 159]"},
        {"tag 2", tag_2, FAULT_INVALID_TENSOR, "text_tags has 2 at [8]"},
        {"video type", video_type, FAULT_INVALID_TENSOR, "video has the type BF16, expected F32"},
        {"text type", text_type, FAULT_INVALID_TENSOR, "text has the type (unknown), expected BF16"},
        {"video dims", video_dims, FAULT_INVALID_TENSOR,
                "video has the shape [24, 2, 4, 4, 1], expected [24, *, *, *]"},
        {"audio no dims", audio_no_dims, FAULT_INVALID_TENSOR,
                "audio has the shape [], expected [32, 2, *]"},
        {"audio many dims", audio_many_dims, FAULT_INVALID_TENSOR, "audio has the shape"},
        {"video channels", video_channels, FAULT_INVALID_TENSOR, "expected [24, *, *, *]"},
        {"audio channels", audio_channels, FAULT_INVALID_TENSOR, "expected [32, 2, *]"},
        {"video zero", video_zero, FAULT_INVALID_TENSOR, "expected [24, *, *, *]"},
        {"video overflow", video_overflow, FAULT_INVALID_TENSOR, "video"},
        {"video size overflow", video_size_overflow, FAULT_INVALID_TENSOR, "video is given 3072 bytes"},
        {"text dim", text_dim, FAULT_INVALID_TENSOR, "text has the shape [10, 144], expected [*, 160]"},
        {"tags length", tags_length, FAULT_INVALID_TENSOR, "text_tags has the shape [8], expected [9]"},
        {"video size", video_size, FAULT_INVALID_TENSOR, "video is given 3068 bytes"},
        {"video offset", video_offset, FAULT_INVALID_TENSOR, "video lies outside its arena"},
        {"audio offset overflow", audio_offset_overflow, FAULT_INVALID_TENSOR,
                "audio lies outside its arena"},
        {"text offset far", text_offset_far, FAULT_INVALID_TENSOR, "text lies outside its arena"},
        {"sigmas unequal", sigmas_unequal, FAULT_INVALID_TENSOR, "5 values, sigmas_audio 4"},
        {"sigmas one", sigmas_one, "", ""},
        {"sigmas ascending", sigmas_ascending, "", "sigmas_video"},
        {"sigmas nan", sigmas_nan, "", "sigmas_audio"},
        {"sigmas large", sigmas_large, "", "sigmas_audio"},
        {"announced one stream", announced_one_stream, FAULT_INVALID_TENSOR, "sigmas_video"},
        {"announced unequal", announced_unequal, FAULT_INVALID_TENSOR, "4 values, sigmas_audio 5"},
        {"announced ascending", announced_ascending, FAULT_INVALID_ARGUMENT, "sigmas_audio[3] is 0.999"},
        {"announced large", announced_large, FAULT_INVALID_ARGUMENT, "sigmas_video[0] is 1.0001"},
        {"announced type", announced_type, FAULT_INVALID_TENSOR, "sigmas_audio has the type I32"},
        {"announced outside", announced_outside, FAULT_INVALID_TENSOR, "sigmas_audio lies outside"},
        {"sigmas many", sigmas_many, FAULT_INVALID_TENSOR, "1002 elements, at most 1001"},
        {"output odd", output_odd, FAULT_INVALID_ARGUMENT, "multiple of 64"},
        {"output outside", output_outside, FAULT_INVALID_ARGUMENT, "output arena of 65536"},
        {"output overflow", output_overflow, FAULT_INVALID_ARGUMENT, "output arena"},
        {"output small", output_small, FAULT_DOES_NOT_FIT,
                "need 10304 bytes of the output arena, 10303 are given"},
        {"output small keep", output_small_keep, FAULT_DOES_NOT_FIT,
                "need 25664 bytes of the output arena, 25663 are given"},
};

/* Of ref2va_small: a sound and a video of 2 frames. */
CHANGE(conditions_31, j->n_conditions = 31)
CHANGE(conditions_many, j->n_conditions = UINT32_MAX)
CHANGE(condition_kind, j->conditions[1].kind = 4)
CHANGE(condition_kind_large, j->conditions[0].kind = UINT32_MAX)
CHANGE(image_two_frames, j->conditions[1].kind = WIRE_CONDITION_IMAGE)
CHANGE(audio_with_picture, j->conditions[1].kind = WIRE_CONDITION_AUDIO)
CHANGE(video_without_picture, j->conditions[0].kind = WIRE_CONDITION_VIDEO)
CHANGE(keyframe_empty, j->conditions[0].kind = WIRE_CONDITION_KEYFRAME; j->conditions[0].audio = 0)
CHANGE(keyframe_beyond, j->conditions[1].kind = WIRE_CONDITION_KEYFRAME; j->conditions[1].frame = 5)
CHANGE(keyframe_size, j->conditions[1].kind = WIRE_CONDITION_KEYFRAME; j->conditions[1].width = 6)
CHANGE(condition_height, j->conditions[1].height = 0)
CHANGE(condition_width, j->conditions[1].width = UINT64_MAX)
CHANGE(condition_frames, j->conditions[1].frames = (1u << 20) + 1)
CHANGE(condition_audio, j->conditions[1].audio = UINT64_MAX / 64)
CHANGE(condition_rows, j->conditions[1].frames = j->conditions[1].height = j->conditions[1].width = 1u << 20)
CHANGE(condition_too_large, j->conditions[1].frames = 400)
CHANGE(condition_offset_odd, j->conditions[1].video_offset += 2)
CHANGE(condition_offset_end, j->conditions[1].video_offset = a->input_size - 24 * 32 * 4 + 4)
CHANGE(condition_offset_overflow, j->conditions[0].audio_offset = UINT64_MAX - 3)
CHANGE(condition_video_nan, set_place(a, j->conditions[1].video_offset + 4 * 700, NAN))
CHANGE(condition_audio_inf, set_place(a, j->conditions[0].audio_offset, INFINITY))
CHANGE(condition_noise, j->condition_noise = 4)
CHANGE(noise_official, j->noise = WIRE_NOISE_OFFICIAL)
CHANGE(noise_unknown, j->noise = 77)
CHANGE(noise_of_a_step, j->kind = WIRE_JOB_STEP; j->noise = WIRE_NOISE_COMFY)
CHANGE(start_of_a_step, j->kind = WIRE_JOB_STEP; j->start_step = 1)
CHANGE(slot_at_zero, j->slot = (WireTensor){.size = 5120, .dtype = ST_U8, .n_dims = 1, .shape = {5120}})
CHANGE(kept_without_keep, j->start_step = 1; j->slot = slot_of(5120);
        j->kept = (WireTensor){.size = 5120, .dtype = ST_U8, .n_dims = 2, .shape = {1, 5120}})
CHANGE(slot_missing, j->start_step = 1)
CHANGE(slot_small, j->start_step = 1; j->slot = slot_of(5119))
CHANGE(slot_of_another_sampler, j->start_step = 1; j->slot = slot_of(5120); j->sampler = 1)
CHANGE(slot_far, j->start_step = 1; j->slot = slot_of(5120); j->slot.offset = a->input_size - 5119)
CHANGE(kept_missing, j->start_step = 1; j->slot = slot_of(5120); j->flags = WIRE_JOB_KEEP_STEPS)
CHANGE(kept_of_fewer, j->start_step = 2; j->slot = slot_of(5120); j->flags = WIRE_JOB_KEEP_STEPS;
        j->kept = (WireTensor){.size = 5120, .dtype = ST_U8, .n_dims = 2, .shape = {1, 5120}})
CHANGE(slot_nan, j->start_step = 1; j->slot = slot_of(5120); memset(a->input + 4, 0xff, 4))
CHANGE(start_at_end, j->start_step = 4; j->slot = slot_of(5120))
CHANGE(unread_alone, j->flags = WIRE_JOB_UNREAD; j->noise = WIRE_NOISE_COMFY)
CHANGE(unread_given, j->flags = WIRE_JOB_PLAN_ONLY | WIRE_JOB_UNREAD)
CHANGE(unread_mask, j->flags = WIRE_JOB_PLAN_ONLY | WIRE_JOB_UNREAD; j->noise = WIRE_NOISE_COMFY; j->mask_video = mask(3, 2, 4, 4))
CHANGE(unread_step, j->kind = WIRE_JOB_STEP; j->flags = WIRE_JOB_PLAN_ONLY | WIRE_JOB_UNREAD)
CHANGE(unread_shape, j->flags = WIRE_JOB_PLAN_ONLY | WIRE_JOB_UNREAD; j->noise = WIRE_NOISE_COMFY; j->audio.shape[1] = 3)
CHANGE(resume_plan, j->flags = WIRE_JOB_PLAN_ONLY | WIRE_JOB_RESUME)
CHANGE(carried_shift, j->sampler = WIRE_SAMPLER_RES_MULTISTEP; j->shift_audio = 0)
CHANGE(carried_shift_nan, j->sampler = WIRE_SAMPLER_RES_MULTISTEP; j->shift_video = NAN)
CHANGE(carried_output, j->sampler = WIRE_SAMPLER_RES_MULTISTEP; j->output_size = 64 + 2 * 12288 - 1)
CHANGE(mask_video_shape, j->mask_video = mask(3, 2, 4, 5))
CHANGE(mask_video_dims, j->mask_video = mask(2, 2, 16, 0))
CHANGE(mask_audio_channels, j->mask_audio = mask(3, 24, 2, 8))
CHANGE(mask_audio_shape, j->mask_audio = mask(2, 2, 7, 0))
CHANGE(mask_audio_dims, j->mask_audio = mask(1, 16, 0, 0))
CHANGE(mask_video_far, j->mask_video = mask(3, 2, 4, 4); j->mask_video.offset = a->input_size - 127)
CHANGE(mask_video_type, j->mask_video = mask(3, 2, 4, 4); j->mask_video.dtype = ST_BF16)
CHANGE(mask_video_above, j->mask_video = mask(3, 2, 4, 4); set_place(a, MASK_AT + 8, 1.001f))
CHANGE(mask_video_nan, j->mask_video = mask(3, 2, 4, 4); set_place(a, MASK_AT + 4, NAN))
CHANGE(mask_audio_below, j->mask_audio = mask(2, 2, 8, 0); set_place(a, MASK_AT, -0.5f))
CHANGE(clean_missing, j->mask_video = mask(3, 2, 4, 4))
CHANGE(clean_audio_missing, j->mask_audio = mask(2, 2, 8, 0))
CHANGE(clean_without_mask, j->clean_audio = j->audio)
CHANGE(clean_shape, j->mask_video = mask(3, 2, 4, 4); j->clean_video = j->audio)
CHANGE(clean_nan, j->mask_video = mask(3, 2, 4, 4); j->clean_video = j->video;
        j->clean_video.offset = CLEAN_AT; set_place(a, CLEAN_AT + 4, NAN))
CHANGE(clean_of_a_step, j->kind = WIRE_JOB_STEP; j->mask_video = mask(3, 2, 4, 4); j->clean_video = j->video)
CHANGE(lora_unknown, j->n_loras = 1; j->loras[0] = (WireLora){99, 1})
CHANGE(lora_denoiser, j->n_loras = 1; j->loras[0] = (WireLora){1, 1})
CHANGE(lora_second_denoiser, j->n_loras = 2; j->loras[0] = (WireLora){3, 1}; j->loras[1] = (WireLora){1, 0})
CHANGE(lora_nan, j->n_loras = 1; j->loras[0] = (WireLora){3, (double) NAN})
CHANGE(lora_inf, j->n_loras = 1; j->loras[0] = (WireLora){3, -HUGE_VAL})
CHANGE(lora_strong, j->n_loras = 1; j->loras[0] = (WireLora){3, 1000.5})
CHANGE(lora_17, j->n_loras = 17; for (int i = 0; i < 16; i++) j->loras[i] = (WireLora){3, 1})
CHANGE(lora_base, j->model = 3)
CHANGE(merge_base, j->kind = WIRE_JOB_MERGE; j->model = 3)
CHANGE(merge_flags, j->kind = WIRE_JOB_MERGE; j->flags = WIRE_JOB_PLAN_ONLY)
CHANGE(merge_lora, j->kind = WIRE_JOB_MERGE; j->n_loras = 1; j->loras[0] = (WireLora){1, 1})

static const Wrong wrong_tasks[] = {
        {"31 conditions", conditions_31, FAULT_INVALID_TENSOR, "has 31 conditions; expected 0 to 30"},
        {"many conditions", conditions_many, FAULT_INVALID_TENSOR, "4294967295 conditions"},
        {"kind", condition_kind, FAULT_INVALID_TENSOR, "Condition 1 is of the unknown kind 4"},
        {"large kind", condition_kind_large, FAULT_INVALID_TENSOR,
                "Condition 0 is of the unknown kind 4294967295"},
        {"image", image_two_frames, FAULT_INVALID_TENSOR, "2 frames"},
        {"audio", audio_with_picture, FAULT_INVALID_TENSOR,
                "Condition 1's sound has a video latent of 2 frames"},
        {"video", video_without_picture, FAULT_INVALID_TENSOR, "Condition 0's video has no video latent"},
        {"empty keyframe", keyframe_empty, FAULT_INVALID_TENSOR, "latent is missing"},
        {"keyframe beyond", keyframe_beyond, FAULT_INVALID_TENSOR, "frames 0 to 4"},
        {"keyframe size", keyframe_size, FAULT_INVALID_TENSOR, "4 x 6"},
        {"height", condition_height, FAULT_INVALID_TENSOR, "height H is 0"},
        {"width", condition_width, FAULT_INVALID_TENSOR, "width W is 18446744073709551615"},
        {"frames", condition_frames, FAULT_INVALID_TENSOR, "frame count T is 1048577"},
        {"audio size", condition_audio, FAULT_INVALID_TENSOR, "audio latents A is"},
        {"rows", condition_rows, FAULT_INVALID_TENSOR, "rows"},
        {"too large", condition_too_large, FAULT_INVALID_TENSOR,
                "video of condition 1 lies outside its arena"},
        {"odd offset", condition_offset_odd, FAULT_INVALID_TENSOR, "video of condition 1 lies at offset"},
        {"offset at the end", condition_offset_end, FAULT_INVALID_TENSOR,
                "video of condition 1 lies outside"},
        {"offset overflow", condition_offset_overflow, FAULT_INVALID_TENSOR,
                "audio of condition 0 lies outside"},
        {"video nan", condition_video_nan, FAULT_INVALID_TENSOR,
                "video of condition 1 has NaN at [21, 1, 3, 0]"},
        {"audio inf", condition_audio_inf, FAULT_INVALID_TENSOR,
                "audio of condition 0 has Inf at [0, 0, 0]"},
        {"condition noise", condition_noise, FAULT_INVALID_ARGUMENT, "unknown number 4"},
        {"official noise", noise_official, FAULT_INVALID_ARGUMENT, "expected given, comfy or diffusers"},
        {"unknown noise", noise_unknown, FAULT_INVALID_ARGUMENT, "number 77"},
        {"noise of a step", noise_of_a_step, FAULT_INVALID_ARGUMENT, "no noise is made"},
        {"start of a step", start_of_a_step, FAULT_INVALID_ARGUMENT, "cannot begin after step 1"},
        {"slot at 0", slot_at_zero, FAULT_INVALID_ARGUMENT, "cannot use them"},
        {"kept without keep", kept_without_keep, FAULT_INVALID_ARGUMENT, "keeps none"},
        {"slot missing", slot_missing, FAULT_INVALID_TENSOR, "Tensor slot has"},
        {"slot small", slot_small, FAULT_INVALID_TENSOR, "slot has the shape [5119], expected [5120]"},
        {"slot of another", slot_of_another_sampler, FAULT_INVALID_TENSOR, "expected [12288]"},
        {"slot far", slot_far, FAULT_INVALID_TENSOR, "slot lies outside its arena"},
        {"kept missing", kept_missing, FAULT_INVALID_TENSOR, "Tensor kept has"},
        {"kept of fewer", kept_of_fewer, FAULT_INVALID_TENSOR,
                "kept has the shape [1, 5120], expected [2, 5120]"},
        {"slot nan", slot_nan, FAULT_INVALID_TENSOR, "video of slot has NaN at [0, 0, 0, 1]"},
        {"start at end", start_at_end, FAULT_INVALID_ARGUMENT, "cannot go on after step 4"},
        {"unread alone", unread_alone, FAULT_INVALID_ARGUMENT, "are not to be read"},
        {"unread given", unread_given, FAULT_INVALID_ARGUMENT, "are not to be read"},
        {"unread mask", unread_mask, FAULT_INVALID_ARGUMENT, "are not to be read"},
        {"unread step", unread_step, FAULT_INVALID_ARGUMENT, "flags 0xc"},
        {"unread shape", unread_shape, FAULT_INVALID_TENSOR, "audio has the shape [32, 3, "},
        {"resume plan", resume_plan, FAULT_INVALID_ARGUMENT, "nothing to resume"},
        {"carried shift", carried_shift, FAULT_INVALID_ARGUMENT, "needs the shifts"},
        {"carried shift nan", carried_shift_nan, FAULT_INVALID_ARGUMENT, "needs the shifts"},
        {"carried output", carried_output, FAULT_DOES_NOT_FIT,
                "need 24640 bytes of the output arena, 24639"},
        {"mask shape", mask_video_shape, FAULT_INVALID_TENSOR,
                "mask_video has the shape [2, 4, 5], expected [2, 4, 4]"},
        {"mask dims", mask_video_dims, FAULT_INVALID_TENSOR, "mask_video has the shape [2, 16]"},
        {"audio mask channels", mask_audio_channels, FAULT_INVALID_TENSOR, "expected [32, 2, 8]"},
        {"audio mask shape", mask_audio_shape, FAULT_INVALID_TENSOR, "expected [2, 8]"},
        {"audio mask dims", mask_audio_dims, FAULT_INVALID_TENSOR, "mask_audio has the shape [16]"},
        {"mask far", mask_video_far, FAULT_INVALID_TENSOR, "mask_video lies outside"},
        {"mask type", mask_video_type, FAULT_INVALID_TENSOR, "mask_video has the type BF16"},
        {"mask above", mask_video_above, FAULT_INVALID_TENSOR, "video_mask[2] is 1.001"},
        {"mask nan", mask_video_nan, FAULT_INVALID_TENSOR, "video_mask[1] is nan"},
        {"mask below", mask_audio_below, FAULT_INVALID_TENSOR, "audio_mask[0] is -0.5"},
        {"clean missing", clean_missing, FAULT_INVALID_TENSOR, "clean_video is missing"},
        {"clean audio missing", clean_audio_missing, FAULT_INVALID_TENSOR, "clean_audio is missing"},
        {"clean without mask", clean_without_mask, FAULT_INVALID_TENSOR,
                "clean_audio is given without mask_audio"},
        {"clean shape", clean_shape, FAULT_INVALID_TENSOR, "clean_video has the shape [32, 2, 8]"},
        {"clean nan", clean_nan, FAULT_INVALID_TENSOR, "clean_video has NaN at [0, 0, 0, 1]"},
        {"clean of a step", clean_of_a_step, FAULT_INVALID_TENSOR, "clean_video is given"},
        {"lora unknown", lora_unknown, FAULT_INTERNAL, "model 99 as an adapter"},
        {"lora denoiser", lora_denoiser, FAULT_INVALID_ARGUMENT, "Adapter 0 of the job is a denoiser"},
        {"second lora denoiser", lora_second_denoiser, FAULT_INVALID_ARGUMENT,
                "Adapter 1 of the job is a denoiser"},
        {"lora nan", lora_nan, FAULT_INVALID_ARGUMENT, "strength of adapter 0 is nan"},
        {"lora inf", lora_inf, FAULT_INVALID_ARGUMENT, "strength of adapter 0 is -inf"},
        {"lora strong", lora_strong, FAULT_INVALID_ARGUMENT, "expected a number from -1000 to 1000"},
        {"17 loras", lora_17, FAULT_INVALID_ARGUMENT, "has 17 LoRA adapters"},
        {"lora as base", lora_base, FAULT_INVALID_ARGUMENT, "for a LoRA adapter"},
        {"merge into lora", merge_base, FAULT_INVALID_ARGUMENT, "for a LoRA adapter"},
        {"merge flags", merge_flags, FAULT_INVALID_ARGUMENT, "flags 0x4"},
        {"merge of denoiser", merge_lora, FAULT_INVALID_ARGUMENT, "Adapter 0 of the job is a denoiser"},
};

static void run_wrong(const char *name, const Wrong *list, size_t n) {
        CLEANUP(arenas_freep) Arenas *a = arenas_new(ARENA, ARENA);
        CLEANUP_FREE uint8_t *input = malloc(a->input_size);
        CLEANUP(broker_freep) Broker *b = broker_open(1);
        WireMessage good, bad, answer, ready;

        broker_load_model(b, 1, NULL);
        broker_load_file(b, 3, "", "dit/lora/lora_comfy.safetensors", NULL);
        broker_give_arenas(b, 2, a);
        a->used = TENSORS_AT;
        good = job_of_golden(b, 5, a, name);
        assert_non_null(input);
        memcpy(input, a->input, a->input_size);

        for (size_t i = 0; i < n; i++) {
                const Wrong *x = &list[i];

                bad = good;
                x->change(&bad.job_open, a);
                broker_send(b, &bad, -EBADF);
                if (!broker_receive(b, &answer))
                        fail_msg("%s: the worker ended", x->what);
                if (answer.header.type != WIRE_ERROR || answer.header.job != 5)
                        fail_msg("%s: %s instead of ERROR", x->what, wire_type_name(answer.header.type));
                if ((x->fault[0] && strcmp(answer.error.fault.name, x->fault) != 0) ||
                        !strstr(answer.error.fault.text, x->part))
                        fail_msg("%s: %s: %s", x->what, answer.error.fault.name, answer.error.fault.text);
                memcpy(a->input, input, a->input_size);
        }
        for (uint64_t i = 0; i < a->output_size; i++)
                assert_int_equal(a->output[i], 0xa5);

        /* The same job unspoilt, in exactly the bytes that it needs. */
        good.job_open.output_size = 64 + 2 * (3072 + 2048);
        broker_open_job(b, &good, &ready);
        assert_int_equal(ready.job_ready.output_used, good.job_open.output_size);
        for (uint32_t i = 0; i < ready.job_ready.steps; i++)
                broker_step(b, 5, i);
        {
                CLEANUP(golden_freep) Golden *traj = golden_open(name);

                assert_near(slot_video(a, &ready, 4), traj, "step.3.video", 768, 2e-5);
                assert_near(slot_audio(a, &ready, 4), traj, "step.3.audio", 512, 2e-5);
        }
}

static void job_open_wrong_refused_and_nothing_written(void **state) {
        run_wrong("traj_euler_4", wrong, ELEMENTSOF(wrong));
}

static void job_open_wrong_tasks_refused_and_nothing_written(void **state) {
        run_wrong("traj_euler_4_ref2va_small", wrong_tasks, ELEMENTSOF(wrong_tasks));
}

/* All places of a request may be one: they are only read. */
static void job_open_overlapping_inputs_are_read(void **state) {
        CLEANUP(arenas_freep) Arenas *a = arenas_new(ARENA, ARENA);
        CLEANUP(broker_freep) Broker *b = broker_open(1);
        float video[768], audio[512];
        WireMessage open, ready;

        broker_load_model(b, 1, NULL);
        broker_give_arenas(b, 2, a);
        open = job_of_golden(b, 5, a, "traj_euler_4_ref2va_small");
        for (unsigned round = 0; round < 2; round++) {
                WireCondition *k = open.job_open.conditions;

                /* the film's start is the reference video, its sound begins like the reference sound */
                k[0].audio_offset = k[1].video_offset;
                open.job_open.video.offset = k[1].video_offset;
                open.job_open.audio.offset = k[1].video_offset + 4;
                if (round == 1) { /* and the same in places of their own */
                        float copy[768];

                        memcpy(copy, a->input + k[1].video_offset, sizeof(copy));
                        open.job_open.video.offset = arenas_put_floats(a, 768, copy);
                        open.job_open.audio.offset = arenas_put_floats(a, 512, copy + 1);
                        k[0].audio_offset = arenas_put_floats(a, 64 * 3, copy);
                }
                open.header.job = 5 + round;
                broker_open_job(b, &open, &ready);
                broker_step(b, 5 + round, 0);
                if (round == 1) {
                        assert_memory_equal(slot_video(a, &ready, 1), video, sizeof(video));
                        assert_memory_equal(slot_audio(a, &ready, 1), audio, sizeof(audio));
                }
                memcpy(video, slot_video(a, &ready, 1), sizeof(video));
                memcpy(audio, slot_audio(a, &ready, 1), sizeof(audio));
        }
}

int main(void) {
        const struct CMUnitTest tests[] = {
                cmocka_unit_test(job_open_wrong_refused_and_nothing_written),
                cmocka_unit_test(job_open_wrong_tasks_refused_and_nothing_written),
                cmocka_unit_test(job_open_overlapping_inputs_are_read),
        };

        return cmocka_run_group_tests(tests, NULL, NULL);
}
