// pm2's view of the daemon: pm2 start ecosystem.config.js. See docs/operations.md.
const fs = require("fs");
const path = require("path");

// Two servers may each take the grace to finish what is in flight; then the store is closed. Only after
// that may pm2 use SIGKILL. Settings stand in the environment or in .env, as the daemon reads them.
function graceSeconds() {
  const line = /^\s*(?:export\s+)?SHUTDOWN_GRACE_SECONDS\s*=\s*["']?([0-9.]+)/m;
  let file = "";
  try {
    file = fs.readFileSync(path.join(__dirname, ".env"), "utf8");
  } catch {
    // No .env: the default holds.
  }
  const found = line.exec(file);
  return Number(process.env.SHUTDOWN_GRACE_SECONDS) || (found && Number(found[1])) || 20;
}

module.exports = {
  apps: [
    {
      name: "god-miner",
      cwd: __dirname,
      script: path.join(__dirname, ".venv", "bin", "god-miner"),
      args: "run",
      interpreter: "none",

      // One process holds the data directory's lock; a second one would only fail.
      exec_mode: "fork",
      instances: 1,

      // A changed file must not restart a miner that is holding jobs.
      watch: false,

      autorestart: true,
      exp_backoff_restart_delay: 500,
      // 78: a setting is wrong, and will be just as wrong in a second.
      stop_exit_codes: [78],

      kill_timeout: Math.ceil((2 * graceSeconds() + 10) * 1000),
      // Only the daemon gets the signal. Training that it started outlives a restart and is found again.
      treekill: false,

      // Every line carries its own time. pm2's would stand before the JSON and break it.
      time: false,
      merge_logs: true,
      // Logs grow without end unless rotated: pm2 install pm2-logrotate (docs/operations.md).
    },
    {
      // The operator's page, on http://127.0.0.1:7997. The miner does not need it:
      // pm2 start ecosystem.config.js --only god-miner leaves it out.
      name: "god-miner-dashboard",
      cwd: __dirname,
      script: path.join(__dirname, ".venv", "bin", "god-miner"),
      args: "dashboard",
      interpreter: "none",
      exec_mode: "fork",
      instances: 1,
      watch: false,
      autorestart: true,
      exp_backoff_restart_delay: 500,
      stop_exit_codes: [78],
      kill_timeout: 5000,
      time: false,
      merge_logs: true,
    },
  ],
};
