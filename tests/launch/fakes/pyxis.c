/*
 * Stands in for pyxis in the tests: takes its options for srun and sbatch, gives each task a mount namespace of its own and
 * leaves the rest to a script, which plays enroot. The script's lines NAME=VALUE are the environment of the image.
 * plugstack.conf: required pyxis.so /path/to/pyxis.sh
 */
#define _GNU_SOURCE
#include <sched.h>
#include <slurm/spank.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <unistd.h>

SPANK_PLUGIN(pyxis, 1)

enum { IMAGE, NAME, MOUNTS, WORKDIR, WRITABLE, HOME, ROOT, NUM_OPTIONS };
#define NEGATED 100

static const char *variable[] = {"IMAGE", "NAME", "MOUNTS", "WORKDIR", "WRITABLE", "HOME", "ROOT"};
static char *value[NUM_OPTIONS];

static int take(int option, const char *argument, int remote)
{
	(void)remote;
	value[option % NEGATED] = strdup(argument && *argument ? argument : option < NEGATED ? "1" : "0");
	return 0;
}

static struct spank_option options[] = {
	{"container-image", "IMAGE|PATH", "[pyxis] image", 1, IMAGE, take},
	{"container-name", "NAME", "[pyxis] name", 1, NAME, take},
	{"container-mounts", "SRC:DST[:FLAGS],...", "[pyxis] bind mounts", 1, MOUNTS, take},
	{"container-workdir", "PATH", "[pyxis] working directory", 1, WORKDIR, take},
	{"container-writable", NULL, "[pyxis] writable filesystem", 0, WRITABLE, take},
	{"container-mount-home", NULL, "[pyxis] mount home", 0, HOME, take},
	{"no-container-mount-home", NULL, "[pyxis] no home", 0, HOME + NEGATED, take},
	{"container-remap-root", NULL, "[pyxis] remap root", 0, ROOT, take},
	{"no-container-remap-root", NULL, "[pyxis] no remap", 0, ROOT + NEGATED, take},
	SPANK_OPTIONS_TABLE_END,
};

/* The script sees the options and the job's variables that the test names, since slurmstepd has none of them itself. */
static void export_to_script(spank_t task)
{
	static const char *wanted[] = {"PATH", "SLURM_JOB_ID", "SLURM_PROCID", "SLURMD_NODENAME", "SLURM_NTASKS", "PYXIS_TEST", NULL};
	char name[32], text[4096];

	for (int i = 0; i < NUM_OPTIONS; ++i) {
		snprintf(name, sizeof name, "PYXIS_%s", variable[i]);
		setenv(name, value[i] ? value[i] : "", 1);
	}
	for (int i = 0; wanted[i]; ++i)
		if (spank_getenv(task, wanted[i], text, sizeof text) == ESPANK_SUCCESS)
			setenv(wanted[i], text, 1);
}

int slurm_spank_init(spank_t task, int count, char **arguments)
{
	(void)count, (void)arguments;
	for (struct spank_option *option = options; option->name; ++option)
		if (spank_option_register(task, option) != ESPANK_SUCCESS)
			return -1;
	return 0;
}

int slurm_spank_task_init(spank_t task, int count, char **arguments)
{
	char command[4096], line[4096] = "";
	FILE *script;

	if (!value[IMAGE] && !value[NAME])
		return 0;
	if (count != 1 || unshare(CLONE_NEWNS) || mount("none", "/", NULL, MS_REC | MS_PRIVATE, NULL))
		return -1;
	export_to_script(task);
	snprintf(command, sizeof command, "bash '%s' 2>&1", arguments[0]);
	script = popen(command, "r");
	while (script && fgets(line, sizeof line, script)) {
		line[strcspn(line, "\n")] = '\0';
		char *equals = strchr(line, '=');
		if (strncmp(line, "pyxis: ", 7) == 0)
			slurm_error("%s", line);
		else if (equals) {
			*equals = '\0';
			spank_setenv(task, line, equals + 1, 1);
		}
	}
	return script && pclose(script) == 0 ? chdir("/") : -1;
}
