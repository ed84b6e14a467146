#!/usr/bin/env bash
# controller_from_guide.sh DEST: the daemons of a controller with the files that setup-controller wrote below DEST, as the
# usual users, in their own namespaces (see test_guide.py). Prints what the controller reports.
# With MariaDB and slurmdbd if they are installed; otherwise without the accounting lines.
set -eu
dest=$1
mount --bind "$dest/etc/slurm" /etc/slurm
mount --bind "$dest/etc/munge" /etc/munge
for folder in /run /var/log /var/lib/slurm /var/lib/munge; do mount -t tmpfs tmpfs "$folder"; done
printf '%s\n' "127.0.0.1 localhost" "10.0.0.1 ctl" "10.0.0.11 gpu01" "10.0.0.12 gpu02" >/run/hosts
mount --bind /run/hosts /etc/hosts
hostname ctl
ip link set lo up
for last in 1 11 12; do ip addr add "10.0.0.$last/24" dev lo; done
install -d -o munge -g munge /run/munge
install -d -o munge -g munge -m 0700 /var/log/munge /var/lib/munge
install -d -o slurm -g slurm /var/log/slurm /var/lib/slurm/slurmctld

until_works() { # polls; the test has a deadline
  until timeout 3 "$@" >/dev/null 2>&1; do sleep 0.1; done
}

setpriv --reuid munge --regid munge --clear-groups munged --foreground &
until_works munge -n
if command -v slurmdbd >/dev/null && command -v mariadbd >/dev/null; then
  mkdir /run/db
  mariadb-install-db --no-defaults --user=root --datadir=/run/db --auth-root-authentication-method=normal --skip-test-db >/dev/null
  mariadbd --defaults-file="$dest/etc/mysql/mariadb.conf.d/60-slurm.cnf" --user=root --datadir=/run/db --socket=/run/db/sock &
  until_works mariadb --no-defaults --socket=/run/db/sock -e 'select 1'
  password=$(sed -n 's/^StoragePass=//p' /etc/slurm/slurmdbd.conf)
  mariadb --no-defaults --socket=/run/db/sock <<END
create database slurm_acct_db;
create user slurm@'127.0.0.1' identified by '$password';
grant all on slurm_acct_db.* to slurm@'127.0.0.1';
END
  slurmdbd -D &
  until_works sacctmgr --noheader show cluster
  echo "accounting=yes"
else
  sed -i '/^AccountingStorage/d' /etc/slurm/slurm.conf
  echo "accounting=no"
fi
slurmctld -D &
until_works scontrol show config
scontrol show config
scontrol show node gpu02
